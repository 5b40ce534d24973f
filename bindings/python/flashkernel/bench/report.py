"""The JSON of a result file, its table on a terminal, and its page."""

import datetime
import html
import json
import os
import pathlib
import platform
import subprocess
import sys

from . import frames, roofline


def commit() -> str:
    """The commit of the checkout we run in, with "+" if it has changes; or what FK_COMMIT says,
    where the sources came without their history."""
    if told := os.environ.get("FK_COMMIT"):
        return told

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(fk, framework, device: str) -> dict:
    info = fk.build_info()
    out = {
        "cpu": _cpu_name(),
        "cpu_target": info["cpu_target"],
        "threads": info["threads"],
        "flashkernel": info["version"],
        "python": platform.python_version(),
        **framework.versions(),
    }
    # What chooses a kernel, or holds ours and torch's to older instruction sets than the CPU has.
    names = ("FK_IMPL", "FK_CPU_TARGET", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    if held := {name: os.environ[name] for name in names if os.environ.get(name)}:
        out["environment"] = held
    if device == "cuda":
        out["gpu"] = info["gpus"][0]["name"] if info["gpus"] else "none"
        out["driver"] = _driver()
        out["cuda"] = info.get("cuda_runtime", "")
    return out


def _cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _driver() -> str:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
        return next(w for w in text.split() if w[0].isdigit() and w.count(".") >= 1)
    except (OSError, StopIteration):
        return "unknown"


def write_json(path: str, result: dict) -> None:
    """Rows of the same case that the file already has are replaced; the others stay, each with the
    commit and date it was measured at."""
    target = pathlib.Path(path)
    stamp = {"commit": result["commit"], "date": result["date"]}
    rows = [{**row, **stamp} for row in result["rows"]]
    new = {_key(row) for row in rows}
    rows = [row for row in rows_of(path) if _key(row) not in new] + rows
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def rows_of(path: str) -> list[dict]:
    """The rows a result file has; none where there is no file."""
    target = pathlib.Path(path)
    if not target.exists():
        return []
    try:
        rows = json.loads(target.read_text())["rows"]
        return [row for row in rows if _key(row)]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: expected a result file or none") from None


def _key(row: dict) -> str:
    return json.dumps([row["op"], row["case"]], sort_keys=True)


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


#: What a peer is called that is a loop in Python over the steps of a sequence.
LOOP = "python loop"
#: And one that a compiler has unrolled into one program, as torch.compile and an export do.
UNROLLED = "unrolled loop"

COLUMNS = ("case", "p50 us", "runs", "rate", "of peak", "best peer", "p50 us", "ratio")
_PEER_TIME = 6  # the column that a narrow terminal has no room for
_WIDE = 118


def cells(row: dict) -> list[str]:
    case = row["case"]
    sizes = " x ".join(str(v) for v in case.values() if type(v) is int)
    flags = "".join(f" +{k}" for k, v in case.items() if v is True)
    net = f"{case['net']} " if "net" in case else ""
    name = f"{row['op']} {net}{sizes} {case['dtype']}{flags}"
    rate = f"{row['tbps'] * 1e3:.1f} GB/s"
    if "tflops" in row:
        rate = (
            f"{row['tflops'] * 1e3:.1f} GFLOP/s"
            if row["tflops"] < 10
            else f"{row['tflops']:.0f} TFLOP/s"
        )
    share = f"{row['percent_of_ceiling']:.0f}%{'!' if row.get('impossible') else ''}"
    if "ceiling" in row:
        share += " " + _SHORT.get(row["ceiling"]["of"], row["ceiling"]["of"])
    disturbed = "*" if row.get("disturbed") else ""
    out = [
        name,
        f"{row['ms']['p50'] * 1e3:.1f}{disturbed}",
        f"{row['warmup']}+{row['iterations']}" if "warmup" in row else f"{row['iterations']}",
        rate,
        share,
    ]
    best = best_peer(row)
    if best is None:
        return out + ["", "", ""]
    time = row["peers"][best]["ms"]["p50"]
    ratio = f"{time / row['ms']['p50']:.2f}x"
    if row["peers"][best].get("kind") == LOOP:
        return out + [f"({LOOP})", f"{time * 1e3:.1f}", f"({ratio})"]
    unrolled = " #" if row["peers"][best].get("kind") == UNROLLED else ""
    return out + [best + unrolled, f"{time * 1e3:.1f}", ratio]


_SHORT = {"memory": "mem", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8"}


def best_peer(row: dict) -> str | None:
    """The fastest peer; one that is a loop in Python only where there is no other."""
    peers = row["peers"]
    return min(
        peers, key=lambda p: (peers[p].get("kind") == LOOP, peers[p]["ms"]["p50"]), default=None
    )


def notes(result: dict) -> list[str]:
    """What a reader of the table has to know of it."""
    rows = result["rows"]
    out = ["runs: to warm up + timed. of peak: of what the cache or memory (mem) that holds the "
           "row's data gives, or of the peak of such arithmetic (f32, bf16, i8)."]  # fmt: skip
    if any(row["peers"] and best_peer_is_loop(row) for row in rows):
        out.append(
            f"({LOOP}): a peer that nobody would use, for want of another; its ratio says little."
        )
    if any(row["peers"] and row["peers"][best_peer(row)].get("kind") == UNROLLED for row in rows):
        out.append(
            "#: a peer made of a loop over the steps of a sequence, which a compiler unrolled."
        )
    busy = result.get("busy") or {}
    disturbed = sum(1 for row in rows if row.get("disturbed"))
    if busy.get("busy"):
        out.append(
            f"This machine was busy: while rows were timed other programs took "
            f"{busy['others_cpus']:.1f} of {busy['cpus']} CPUs, {100 * busy['steal']:.0f}% of the "
            f"time was stolen by the host; load {busy['load_at_start']:.1f} and "
            f"{busy['runnable_at_start']} other programs running at the start."
        )
    if disturbed:
        out.append(
            f"*: disturbed, {disturbed} of {len(rows)} rows (the file says by what). Their times "
            "are too long, and their ratios may be wrong: measure again on a quiet machine."
        )
    if wrong := sum(1 for row in rows if row.get("impossible")):
        out.append(
            f"!: {wrong} of {len(rows)} rows are above their ceiling, which cannot be: either a "
            "ceiling was disturbed all through the run, or the row's bytes or FLOPs are miscounted."
        )
    return out


def best_peer_is_loop(row: dict) -> bool:
    return row["peers"][best_peer(row)].get("kind") == LOOP


def print_table(result: dict) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title(result))
        table = [list(COLUMNS)] + [cells(row) for row in result["rows"]]
        widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        print(*notes(result), *frames.lines(result["rows"]), sep="\n")
        return
    # A file or a pipe has no width of its own; rich would take 80 columns for it.
    console = Console(
        width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, highlight=False
    )
    shown = [i for i in range(len(COLUMNS)) if console.width >= _WIDE or i != _PEER_TIME]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in shown:
        justify = "left" if COLUMNS[i] in ("case", "best peer") else "right"
        table.add_column(COLUMNS[i], justify=justify, overflow="fold", no_wrap=i > 0)
    for row in result["rows"]:
        line = cells(row)
        table.add_row(*(line[i] for i in shown))
    console.print(title(result), style="bold", markup=False)
    console.print(table)
    for note in notes(result) + frames.lines(result["rows"]):
        console.print(note, markup=False)


def title(result: dict) -> str:
    m = result["machine"]
    where = m.get("gpu") or f"{m['cpu']}, {m['threads']} threads, {m['cpu_target']}"
    return f"FlashKernel {m['flashkernel']} on {where}, {result['date']}"


ROOFLINE = (
    "Each point is the row of its number (orange: a backward). A slope is the bandwidth of a cache "
    "or of the memory, a flat line the peak of an arithmetic, as measured in the same run."
)


def write_html(path: str, result: dict) -> None:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in ("", *COLUMNS))
    lines, labelled = [], []
    for number, row in enumerate(result["rows"], 1):
        c = [html.escape(x) for x in cells(row)]
        labelled.append((f"{number} {cells(row)[0]}", row))
        width = min(100.0, row["percent_of_ceiling"])
        bar = f'<div class="bar"><i style="width:{width:.0f}%"></i></div>'
        slow = " class=slow" if 0 < row["ratio_to_best_peer"] < 1 else ""
        lines.append(
            f"<tr{slow}><td class=n>{number}</td><td>{c[0]}</td>"
            + "".join(f"<td class=n>{x}{bar if i == 4 else ''}</td>" for i, x in enumerate(c) if i)
            + "</tr>"
        )
    about = ("machine", "method", "ceilings", "busy")
    details = html.escape(json.dumps({k: result[k] for k in about if k in result}))
    said = "".join(f"<p>{html.escape(note)}</p>\n" for note in notes(result))
    if plot := roofline.svg(labelled, result["ceilings"]):
        plot = f"<h2>Roofline</h2>\n<p>{ROOFLINE}</p>\n{plot}\n"
    budget = "".join(
        f"<h2>Frame budget, {precision}</h2>\n{frames.svg(nets)}\n"
        for precision, nets in frames.budgets(result["rows"]).items()
    )
    page = f"""<!doctype html><meta charset="utf-8"><title>{html.escape(title(result))}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid #8884; text-align: left }}
.n {{ text-align: right; font-variant-numeric: tabular-nums }}
.bar {{ background: #8883; height: 4px }} .bar i {{ background: #2a7; display: block; height: 4px }}
.slow td:last-child {{ color: #d50 }} code {{ font-size: 12px; color: #888 }}
{roofline.STYLE}{frames.STYLE}</style>
<h1>{html.escape(title(result))}</h1>
<p>Ratio: the best peer's median over ours, measured in turns in one run; above 1 we are faster.</p>
{said}{budget}<table><tr>{head}</tr>{"".join(lines)}</table>
{plot}<p><code>{details}</code></p>
"""
    pathlib.Path(path).write_text(page)

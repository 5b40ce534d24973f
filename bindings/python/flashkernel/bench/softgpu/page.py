"""The counters as a table on a terminal, and as a page with estimates for each chip."""

import html
import pathlib

from . import chips, machine_code, model
from .compare import name

COLUMNS = (
    "case", "impl", "launches", "warp instructions", "tensor FLOPs / least", "bytes / least",
    "sectors a load", "sectors a store", "bank conflicts", "barriers",
)  # fmt: skip
UNITS = ("launch", "latency", "tensor", "issue", "fma", "integer", "special", "load_store", "L2",
         "memory")  # fmt: skip


def cells(row: dict) -> list[str]:
    products = f"{row['flops_over_least']:.2f}" if row.get("tensor_flops") else ""
    return [
        name(row), row["impl"], str(row["launches"]), f"{row['warp_instructions']:,}", products,
        f"{row['bytes_over_least']:.2f}", f"{row['sectors_a_load']:.1f}",
        f"{row['sectors_a_store']:.1f}", f"{row['bank_conflicts']:,}", f"{row['barriers']:,}",
    ]  # fmt: skip


def print_table(rows: list[dict]) -> None:
    table = [list(COLUMNS)] + [cells(row) for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def estimates(rows: list[dict], of: tuple = ()) -> list[list[str]]:
    """For each row of full-size counters, the estimate on its chip; an H200's also on an H100."""
    lines = []
    for row in rows:
        where = [row["chip"], *(["H100"] if row["chip"] == "H200" else [])]
        for chip in where:
            if of and chip not in of:
                continue
            estimate = model.of_call(row["launches"], chips.CHIPS[chip])
            shares = {n: estimate.units.get(n, 0.0) / estimate.seconds for n in UNITS}
            measured = f"{1e3 * row['ms']:.1f}" if "ms" in row and chip == row["chip"] else ""
            lines.append([
                name({**row, "chip": chip}), f"{1e6 * estimate.seconds:.1f}", measured,
                estimate.binds, *(f"{100 * shares[n]:.0f}%" for n in UNITS),
            ])  # fmt: skip
    return lines


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem }
table { border-collapse: collapse; width: 100% }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #8884; text-align: left }
td + td, th + th { text-align: right; font-variant-numeric: tabular-nums }
.binds { background: #2a73; font-weight: 600 }
"""
_ESTIMATES = (
    "Estimates, not measurements: from counters of the GPU in software and the chips' data sheets, "
    "with constants fitted to rows that an H200 was timed on. A percentage is the time that a unit "
    "needs at the least, as a share of the estimate; the one that needs the most binds (marked). "
    "Where a time was measured, it stands beside."
)


def _table(head, lines, binds: int | None = None) -> str:
    out = ["<table><tr>" + "".join(f"<th>{html.escape(c)}</th>" for c in head) + "</tr>"]
    for line in lines:
        marked = head.index(line[binds]) if binds is not None else -1
        out.append("<tr>" + "".join(
            f"<td{' class=binds' if i == marked else ''}>{html.escape(c)}</td>"
            for i, c in enumerate(line)
        ) + "</tr>")  # fmt: skip
    return "\n".join(out) + "</table>"


def machine_code_lines(rows: list[dict], known: dict) -> list[list[str]]:
    """A line for each kernel of the rows and chip, of what its machine code shows."""
    kernels = {(row["chip"], k["kernel"]) for row in rows for k in row.get("kernels", ())}
    lines = []
    for chip, kernel in sorted(kernels):
        if fact := machine_code.of(kernel, chip, known):
            loop = ", ".join(f"{n} {kind}" for kind, n in fact["main_loop"].items())
            figures = ("registers", "stack_bytes", "local_instructions", "instructions")
            lines.append([f"{chip}: {kernel}", *(str(fact[f]) for f in figures), loop])
    return lines


def write(path: str, rows: list[dict], full_size: list[dict], results: str) -> None:
    """`rows` are counted whole, `full_size` are those that the estimates are of; `results` is the
    folder with machine_code.json."""
    machine_code.with_registers(full_size, results)
    code = machine_code_lines(rows, machine_code.facts(results))
    code_head = ("kernel", "registers", "stack, bytes", "spills", "instructions", "main loop")
    head = ("case", "estimate, us", "measured, us", "binds", *UNITS)
    text = f"""<!doctype html><meta charset="utf-8">
<title>FlashKernel on the GPU in software</title>
<style>{_STYLE}</style>
<h1>FlashKernel on the GPU in software</h1>
<p>Counted, the same on every run and every machine: docs/softgpu.md says what each figure is.</p>
{_table(COLUMNS, [cells(row) for row in rows])}
<h2>Estimates of the time, and what binds</h2>
<p>{_ESTIMATES}</p>
{_table(head, estimates(full_size), binds=3)}
<h2>Machine code</h2>
<p>What the compiler made of each kernel: no times, and nothing that was run.</p>
{_table(code_head, code)}
"""
    pathlib.Path(path).write_text(text)

"""`fk bench --device softgpu [SUITE]`: counts a suite's cases, or all suites', on each chip, and
writes results/softgpu/SUITE.json and a page."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import flashkernel as fk

from .. import report
from . import device, page
from .cases import CHIPS, SAMPLED, SUITES
from .compare import key, regressions


def parse(arguments):
    about = [(name, " ".join(suite.__doc__.split())) for name, suite in SUITES.items()]
    about.append(("all", "Every suite."))
    parser = argparse.ArgumentParser(
        "fk bench --device softgpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="suites:\n" + "\n".join(f"  {name:12} {text}" for name, text in about),
    )
    add = parser.add_argument
    add("suite", nargs="?", default="all", choices=(*SUITES, "all"), metavar="SUITE",
        help="what to count; default: all")  # fmt: skip
    add("--chip", action="append", choices=tuple(CHIPS.values()), help="only these; default: all")
    add("--quick", action="store_true", help="only the cases that the tests count again")
    add("--json", metavar="FOLDER", help="write (or update) FOLDER/SUITE.json")
    add("--compare", metavar="FOLDER", help="exit with 1 where a row is worse than FOLDER's")
    add("--results", metavar="FOLDER", default="results/softgpu",
        help="where machine_code.json is, for the page; default: results/softgpu")  # fmt: skip
    add("--html", metavar="F", help="write a page with the counters and estimates of the time")
    options = parser.parse_args(arguments)
    if not device.present():
        parser.error(f"--device softgpu: {device.missing()}")
    try:
        import torch  # noqa: F401
    except ImportError:
        parser.error("--device softgpu: torch is needed, whose CPU tensors are the software GPU's")
    return options


def count(suites: list[str], chips: list[str], quick: bool) -> tuple[list[dict], bool]:
    """The rows of each chip, each in a process of its own, and whether any case failed."""
    architectures = [a for a, name in CHIPS.items() if name in chips]
    at_once = max(1, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(min(at_once, len(architectures))) as pool:
        # The slowest first.
        parts = pool.map(lambda a: _count_one(a, suites, quick), reversed(architectures))
        rows, failed = zip(*list(parts)[::-1], strict=True)
        return [row for part in rows for row in part], any(failed)


def _count_one(architecture: int, suites: list[str], quick: bool) -> tuple[list[dict], bool]:
    command = [sys.executable, "-m", f"{__package__}.count", str(architecture)]
    command += [*(["--quick"] if quick else []), *suites]
    environment = {**os.environ, "FK_SOFTGPU_ARCH": str(architecture), "OMP_NUM_THREADS": "1"}
    for name in ("FK_SOFTGPU_SEED", "FK_SOFTGPU_RACES", "FK_SOFTGPU_MULTIPROCESSORS", "FK_IMPL"):
        environment.pop(name, None)  # rows are to be the same wherever they are counted
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode != 0


def write(folder: str, suite: str, rows: list[dict]) -> None:
    """A row is only ever replaced by a newer count of the same case on the same chip."""
    target = pathlib.Path(folder, f"{suite}.json")
    new = {key(row) for row in rows}
    kept = [row for row in read(folder, suite) if key(row) not in new]
    order = {name: i for i, name in enumerate(CHIPS.values())}
    # Stable: cases stay in the suite's order.
    every = sorted(kept + rows, key=lambda row: order[row["chip"]])
    version = fk.build_info()["version"]
    head = {
        "machine": {"gpu": "software", "chips": list(CHIPS.values()), "flashkernel": version},
        "commit": report.commit(),
        "date": report.now(),
        "method": {"counted": "every warp instruction of every launch of the call, on the GPU in "
                   "software; no times"},
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in every)
    text = json.dumps(head, indent=1)
    target.write_text(f'{text[:-2]},\n "rows": [\n{lines}\n]}}\n')


def read(folder: str, suite: str) -> list[dict]:
    target = pathlib.Path(folder, f"{suite}.json")
    return json.loads(target.read_text())["rows"] if target.exists() else []


def main(arguments=None) -> int:
    options = parse(arguments)
    suites = list(SUITES) if options.suite == "all" else [options.suite]
    rows, failed = count(suites, options.chip or list(CHIPS.values()), options.quick)
    by_suite = {
        name: [{k: v for k, v in row.items() if k != "suite"} for row in rows
               if row["suite"] == name]
        for name in suites
    }  # fmt: skip
    page.print_table([row for row in rows if row["suite"] != SAMPLED])
    worse = []
    if options.compare:
        for name, counted in by_suite.items():
            if name != SAMPLED:
                worse += regressions(counted, read(options.compare, name))
    for line in worse:
        print(line, file=sys.stderr)
    if options.json:
        for name, counted in by_suite.items():
            if counted:
                write(options.json, name, counted)
    if options.html:
        sampled = by_suite.pop(SAMPLED, [])
        counted = [row for part in by_suite.values() for row in part]
        page.write(options.html, counted, sampled, options.results)
    return 1 if worse or failed else 0

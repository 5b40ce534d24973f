"""Counts the calls that results/h200 has times of: `python -m flashkernel.bench.softgpu.measured
results/h200 results/softgpu/measured.json [SUITE...]`, with FK_SOFTGPU_ARCH=90. The file is what
the estimates are fitted to and tested against; a suite's rows replace those it had."""

import json
import os
import pathlib
import sys
import time

from ... import _library
from .. import report
from ..suites import Case
from .full_size import launches_of, shares_out_work

#: Files whose rows are calls of one op from torch; the others chain calls, or time other things.
SUITES = (
    "bandwidth", "conv1d", "mamba", "mamba_step", "linear", "attention", "attention_float8",
    "attention_packed", "attention_more", "attention_portable", "attention_grid",
)  # fmt: skip


def case_of(row: dict) -> Case:
    params = {k: v for k, v in row["case"].items() if k not in ("dtype", "framework")}
    op, _, direction = row["op"].rpartition("_")
    return Case(op, direction, row["case"]["dtype"], tuple(params.items()))


def count(row: dict, known: dict) -> list[dict]:
    """The launches of a measured row, by the kernels that it was measured with."""
    case = case_of(row)
    _library.force_implementation(row["op"], row["impl"])
    try:
        continued = shares_out_work(row["op"], row["impl"])
        return launches_of(case, continued, known, row["impl"])
    finally:
        _library.force_implementation(row["op"], None)


def main() -> int:
    results, output, *suites = sys.argv[1:]
    if os.environ.get("FK_SOFTGPU_ARCH") != "90":
        print("FK_SOFTGPU_ARCH=90 is needed: the rows are an H200's", file=sys.stderr)
        return 2
    target = pathlib.Path(output)
    rows = json.loads(target.read_text())["rows"] if target.exists() else []
    for suite in suites or SUITES:
        known: dict = {}
        counted = []
        for row in json.loads(pathlib.Path(results, f"{suite}.json").read_text())["rows"]:
            if row["case"].get("keeps_before") and row["op"] == "linear_fwd":
                continue  # what training keeps is no call of its own
            start = time.monotonic()
            try:
                launches = count(row, known)
            except Exception as error:  # a row that today's library refuses
                print(f"{suite}: {row['op']} {row['case']}: {error}", file=sys.stderr, flush=True)
                continue
            if not launches:
                continue  # a gradient that is a view
            seconds = time.monotonic() - start
            print(f"{suite}: {row['op']} {row['case']}: {seconds:.1f} s", flush=True)
            counted.append({
                "suite": suite, "chip": "H200", "op": row["op"], "case": row["case"],
                "impl": row["impl"], "ms": row["ms"]["p50"], "launches": launches,
            })  # fmt: skip
        rows = [row for row in rows if row["suite"] != suite] + counted
        head = {
            "machine": {"gpu": "software, H200", "ms": "NVIDIA H200"},
            "commit": report.commit(),
            "date": report.now(),
            "method": {"counted": "full_size.py: a few blocks of each launch, or short lengths",
                       "ms": "the median in results/h200, of the commit named there"},
        }  # fmt: skip
        lines = ",\n".join(json.dumps(row) for row in rows)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())

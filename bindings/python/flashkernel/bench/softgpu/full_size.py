"""Counters of calls that are too large to interpret whole, as the time of a chip is measured with.

The call is made at its full size, so that dispatch and launch shapes are the true ones; of each
launch a few blocks run, spread over the grid, and their counters are multiplied by the blocks that
they stand for. Hopper's attention cannot be sampled so, since its blocks take tiles from a common
counter: there one head runs whole at three short lengths, and each counter is continued to the full
length by the parabola through them (tiles of queries times tiles of keys) and multiplied by the
number of heads.
"""

import json
import os
import re
import subprocess
import sys

from ... import _library
from ..suites import Case
from .count import calls_of, counters_of, readable

#: Blocks of a launch that run. A prime, so that no row of a grid of powers of two is preferred.
SAMPLE = 7

#: Lengths at which one head of Hopper's attention runs.
LENGTHS = (512, 1024, 1536)

#: Counters that add up over blocks.
ADDED = (
    "warp_instructions", "global_load_bytes", "global_store_bytes", "global_atomic_bytes",
    "global_load_requests", "global_load_sectors", "global_store_requests", "global_store_sectors",
    "shared_load_wavefronts", "shared_store_wavefronts", "barriers",
)  # fmt: skip
CLASSES = ("fma", "float", "integer", "compare", "special", "convert", "shuffle", "load_global",
           "store_global", "async_copy")  # fmt: skip

_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_TYPES = ("e4m3", "e5m2", "bf16", "tf32", "f16", "u8", "s8")


def products(by_opcode: dict) -> dict:
    """Floating-point operations of matrix products by instruction and type of inputs: "wgmma bf16",
    "mma tf32"."""
    flops = {}
    for opcode, times in by_opcode.items():
        if not opcode.startswith(("mma.", "wgmma.mma")):
            continue
        m, n, k = map(int, _SHAPE.search(opcode).groups())
        warps = 4 if opcode.startswith("wgmma") else 1  # of which one product is
        inputs = opcode.split(".")[-3:] if warps == 1 else opcode.split(".")[-2:]
        kind = next(t for t in _TYPES if t in inputs)
        name = f"{opcode.split('.')[0]} {kind}"
        flops[name] = flops.get(name, 0) + 2 * m * n * k * times // warps
    return flops


def _figures(launch: dict) -> dict:
    """All that is added up, by name."""
    counters = launch["counters"]
    out = {name: counters[name] for name in ADDED}
    out |= {f"class {name}": counters["by_class"].get(name, 0) for name in CLASSES}
    return out | {f"flops {name}": n for name, n in products(counters["by_opcode"]).items()}


def _shape(launch: dict) -> dict:
    grid, block = launch["grid"], launch["block"]
    return {
        "kernel": readable(launch["name"]),
        "blocks": grid[0] * grid[1] * grid[2],
        "threads": block[0] * block[1] * block[2],
        "shared_bytes": launch["shared_bytes"],
    }


def sampled(launch: dict) -> dict:
    """A launch of which some blocks ran, as if all had."""
    counters = launch["counters"]
    factor = counters["blocks"] / max(counters["blocks_run"], 1)
    memory = sum(min(of, bytes * factor) for bytes, of in counters["touched"])
    figures = {name: round(value * factor) for name, value in _figures(launch).items()}
    return _without_zeros({**_shape(launch), **figures, "memory_bytes": round(memory)})


def _without_zeros(launch: dict) -> dict:
    return {name: value for name, value in launch.items() if value != 0}


def parabola(lengths, values, at: int) -> float:
    """What the parabola through three points is elsewhere."""
    total = 0.0
    for i, (x, y) in enumerate(zip(lengths, values, strict=True)):
        for j, other in enumerate(lengths):
            if i != j:
                y = y * (at - other) / (x - other)
        total += y
    return total


def shares_out_work(op: str, implementation: str) -> bool:
    """Whether blocks take tiles from a common counter, or wait for each other, as those of Hopper's
    attention do."""
    return op.startswith("attention") and implementation.startswith("cuda_sm90")


def launches_of(case, continued: bool, known: dict, implementation: str = "") -> list[dict]:
    """The launches of a case with their counters; `continued` where they are to be continued from
    short lengths, of which `known` keeps the counters. `implementation` is what was forced."""
    _, _, call = calls_of(case, sample=0)
    shapes = [_shape(launch) for launch in counters_of(call, 0)]
    if not continued:
        return _by_sample(case, call, shapes, known)
    params = dict(case.params)
    heads = params["H"] // params.get("G", params["H"])  # that share a key head
    one = {**params, "B": 1, "H": heads} | ({"G": 1} if heads > 1 else {})
    probes = _probes(case, one, [shape["kernel"] for shape in shapes], known, implementation)
    times = params["B"] * params["H"] // heads
    out = []
    for shape, *at in zip(shapes, *probes, strict=True):
        whole = {
            name: round(max(0.0, parabola(LENGTHS, [f[name] for f in at], params["L"])))
            for name in at[0]
        }
        out.append(
            _without_zeros({**shape, **{name: value * times for name, value in whole.items()}})
        )
    return out


def _by_sample(case, call, shapes: list[dict], known: dict) -> list[dict]:
    """A batch of attention does what its sequences do, so that it may be counted by another one of
    as long sequences and the same kernels."""
    params = dict(case.params)
    batch = params.pop("B", 1) if case.op == "attention" else 1
    key = (case.op, case.direction, case.dtype, *sorted(params.items()))
    if case.op == "attention" and key in known:
        other, launches = known[key]
        same = [
            (shape["kernel"], shape["blocks"] * other) == (a["kernel"], a["blocks"] * batch)
            for shape, a in zip(shapes, launches, strict=True)
        ]
        if all(same):
            return [
                _times(shape, a, batch / other) for shape, a in zip(shapes, launches, strict=True)
            ]
    launches = [sampled(launch) for launch in counters_of(call, SAMPLE)]
    known[key] = (batch, launches)
    return launches


def _times(shape: dict, launch: dict, factor: float) -> dict:
    return {k: shape[k] if k in shape else round(v * factor) for k, v in launch.items()}


def _probes(
    case, one: dict, kernels: list[str], known: dict, implementation: str
) -> list[list[dict]]:
    """The figures of each launch at each of LENGTHS. One head has few tiles, for which dispatch may
    choose otherwise than for many; on a chip of two multiprocessors few are many."""
    key = (case.op, case.direction, case.dtype, tuple({**one, "L": 0}.items()))
    for multiprocessors in (0, 2, 1):
        if (key, multiprocessors) not in known:
            text = json.dumps([case.op, case.direction, case.dtype, one, multiprocessors])
            chip = {"FK_SOFTGPU_MULTIPROCESSORS": str(multiprocessors)} if multiprocessors else {}
            done = subprocess.run(
                [sys.executable, "-m", __name__, text, implementation],
                env={**os.environ, **chip},
                capture_output=True,
                text=True,
            )
            # What such a small chip cannot run is no answer.
            known[key, multiprocessors] = json.loads(done.stdout or "[[[]], []]")
        names, figures = known[key, multiprocessors]
        if all(name == kernels for name in names):
            return figures
    raise RuntimeError(f"other kernels at short lengths than {', '.join(kernels)}")


def _probe(text: str) -> tuple[list, list]:
    """At each of LENGTHS, the kernels' names and what they count."""
    op, direction, dtype, one, _ = json.loads(text)
    names, figures = [], []
    for length in LENGTHS:
        _, _, call = calls_of(Case(op, direction, dtype, tuple({**one, "L": length}.items())))
        made = counters_of(call)
        names.append([readable(launch["name"]) for launch in made])
        figures.append([
            {**_figures(launch), "memory_bytes": launch["counters"]["global_unique_bytes"]}
            for launch in made
        ])  # fmt: skip
    for name in {name for launches in figures for f in launches for name in f}:
        for launches in figures:
            for f in launches:
                f.setdefault(name, 0)
    return names, figures


if __name__ == "__main__":
    if sys.argv[2]:
        op, direction = json.loads(sys.argv[1])[:2]
        _library.force_implementation(f"{op}_{direction}", sys.argv[2])
    print(json.dumps(_probe(sys.argv[1])))

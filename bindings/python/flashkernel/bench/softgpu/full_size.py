"""Counters of calls that are too large to interpret whole, as the time of a chip is measured with.

The call is made at its full size, so that dispatch and launch shapes are the true ones; of each
launch a few blocks run, spread over the grid, and their counters are multiplied by the blocks that
they stand for. Hopper's attention cannot be sampled so, since its blocks take tiles from a common
counter: there one head runs whole at three short lengths, and each counter is continued to the full
length by the parabola through them (tiles of queries times tiles of keys) and multiplied by the
number of heads.
"""

import re
from dataclasses import replace

from . import device
from .count import calls_of, counters_of, readable

#: Blocks of a launch that run. A prime, so that no row of a grid of powers of two is preferred.
SAMPLE = 7

#: Lengths at which one head of Hopper's attention runs.
LENGTHS = (512, 1024, 1536)

#: Counters that add up over blocks.
ADDED = (
    "warp_instructions", "global_atomic_bytes", "global_load_requests", "global_load_sectors",
    "global_store_requests", "global_store_sectors", "shared_load_wavefronts",
    "shared_store_wavefronts", "barriers",
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


def launches_of(case, continued: bool, known: dict) -> list[dict]:
    """The launches of a case with their counters; `continued` where they are to be continued from
    short lengths, of which `known` keeps the counters."""
    if not continued:
        _, _, call = calls_of(case, sample=0)
        return [sampled(launch) for launch in counters_of(call, SAMPLE)]
    _, _, call = calls_of(case, sample=0)
    shapes = [_shape(launch) for launch in counters_of(call, 0)]
    params = dict(case.params)
    heads = params["H"] // params.get("G", params["H"])  # that share a key head
    one = {**params, "B": 1, "H": heads} | ({"G": 1} if heads > 1 else {})
    probes = []
    for length in LENGTHS:
        small = replace(case, params=tuple({**one, "L": length}.items()))
        if (small.op, small.direction, small.dtype, small.params) not in known:
            _, _, call = calls_of(small)
            known[small.op, small.direction, small.dtype, small.params] = counters_of(call)
        probes.append(known[small.op, small.direction, small.dtype, small.params])
    times = params["B"] * params["H"] // heads
    out = []
    for shape, *at in zip(shapes, *probes, strict=True):
        if len({shape["kernel"], *(readable(launch["name"]) for launch in at)}) > 1:
            raise RuntimeError(f"{case.name}: other kernels at short lengths than {shape['kernel']}")
        figures = [
            {**_figures(launch), "memory_bytes": launch["counters"]["global_unique_bytes"]}
            for launch in at
        ]
        whole = {
            name: round(max(0.0, parabola(LENGTHS, [f[name] for f in figures], params["L"])))
            for name in figures[0]
        }
        out.append(
            _without_zeros({**shape, **{name: value * times for name, value in whole.items()}})
        )
    return out

"""An estimate of the time that a launch takes, from its counters, its shape and the chip. It is an
estimate: nothing here was timed on the chip that it is for, except that the constants below were
fitted to the measured rows of results/h200 (fit.py), and a test says how far it is from them.

Each unit of a multiprocessor needs so many clocks for what the launch asks of it, L2 and memory so
many seconds for the bytes. Units work beside one another, so the slowest one binds; that they get
into each other's way is the power mean that their times are added with. What no unit's throughput
shows, how long a warp waits for its own results, is a time of its own: "latency".
"""

import math
from dataclasses import dataclass

from .chips import Chip

#: Fitted by `python -m flashkernel.bench.softgpu.fit results/softgpu/measured.json`: of each unit,
#: the share of its peak that kernels reach at best (a unit that PTX counts overstate may have more
#: than 1: the compiler removes instructions); latencies in clocks; the launch in seconds.
FITTED = {
    "wgmma": 0.658,
    "mma": 0.413,
    "issue": 1.28,
    "fma": 0.648,
    "integer": 0.6,
    "special": 0.906,
    "load_store": 1.2,
    "L2": 1,
    "memory": 0.992,
    "power": 3.07,
    "launch_seconds": 2.14e-06,
    "next_launch_seconds": 3e-06,
    "warp_clocks": 0.5,
    "load_clocks": 10,
    "barrier_clocks": 24.5,
}


@dataclass(frozen=True)
class Estimate:
    seconds: float
    units: dict  # seconds that each unit needs at the least
    waves: float  # blocks over those that the chip holds at once

    @property
    def binds(self) -> str:
        """The unit that needs the most."""
        return max(self.units, key=self.units.get)


def resident(launch: dict, chip: Chip) -> int:
    """Blocks that a multiprocessor holds at once."""
    warps = -(-launch["threads"] // 32)
    limits = [chip.blocks, chip.threads // (32 * warps)]
    if shared := launch.get("shared_bytes"):
        limits.append(chip.shared_bytes // (shared + 1024))
    if launch.get("registers"):
        limits.append(chip.registers // (launch["registers"] * 32 * warps))
    return max(1, min(limits))


def units(launch: dict, chip: Chip, fitted: dict = FITTED) -> dict:
    """Seconds that each unit needs for a launch."""

    def total(*names):
        return sum(launch.get(name, 0) for name in names)

    def classes(*names):
        return total(*(f"class {name}" for name in names))

    # The multiprocessor with the most blocks has to do this share of the work.
    blocks = launch["blocks"]
    share = -(-blocks // chip.multiprocessors) / blocks
    clock = share / chip.clock
    warps = blocks * -(-launch["threads"] // 32)
    out = {}
    for name, flops in launch.items():
        if name.startswith("flops "):
            how, kind = name.split()[1:]
            # Before Hopper mma has all of the tensor cores; there it is the slower of two ways.
            share_of_peak = fitted[how if chip.wgmma else "wgmma"]
            rate = chip.tensor[kind] * share_of_peak
            out["tensor"] = out.get("tensor", 0.0) + clock * flops / rate
    instructions = total("warp_instructions")
    out["issue"] = clock * instructions / (chip.issue * fitted["issue"])
    out["fma"] = clock * classes("fma", "float") / (chip.fma * fitted["fma"])
    out["integer"] = clock * classes("integer", "compare") / (chip.integer * fitted["integer"])
    special = classes("special") / chip.special + classes("convert") / chip.convert
    out["special"] = clock * special / fitted["special"]
    sectors = total("global_load_sectors", "global_store_sectors")
    # What the copy engine moves does not pass through the load/store units.
    requests = total("global_load_requests", "global_store_requests")
    by_lanes = min(1.0, classes("load_global", "store_global") / max(requests, 1))
    wavefronts = total("shared_load_wavefronts", "shared_store_wavefronts")
    load_store = wavefronts + by_lanes * sectors / 4 + classes("shuffle")
    out["load_store"] = clock * load_store / (chip.shared * fitted["load_store"])
    # Loads bring whole sectors, stores only their bytes.
    l2 = 32 * total("global_load_sectors") + total("global_store_bytes", "global_atomic_bytes")
    out["L2"] = l2 / (chip.l2 * fitted["L2"])
    out["memory"] = total("memory_bytes") / (chip.memory * fitted["memory"])
    # A warp's own instructions follow one another; waves of blocks do too.
    waves = math.ceil(blocks / (chip.multiprocessors * resident(launch, chip)))
    loads = classes("load_global", "async_copy")
    own = (
        fitted["warp_clocks"] * instructions
        + fitted["load_clocks"] * loads
        + fitted["barrier_clocks"] * total("barriers")
    )
    out["latency"] = waves * own / warps / chip.clock
    return out


def of_launch(launch: dict, chip: Chip, fitted: dict = FITTED) -> Estimate:
    parts = units(launch, chip, fitted)
    power = fitted["power"]
    highest = max(parts.values())
    together = highest * sum((t / highest) ** power for t in parts.values()) ** (1 / power)
    waves = launch["blocks"] / (chip.multiprocessors * resident(launch, chip))
    return Estimate(together, parts, waves)


def of_call(launches: list[dict], chip: Chip, fitted: dict = FITTED) -> Estimate:
    """Of launches one after the other."""
    parts, seconds, waves = {"launch": 0.0}, 0.0, 0.0
    for i, launch in enumerate(launches):
        one = of_launch(launch, chip, fitted)
        begin = fitted["next_launch_seconds" if i else "launch_seconds"]
        parts["launch"] += begin
        seconds += begin + one.seconds
        waves = max(waves, one.waves)
        for name, t in one.units.items():
            parts[name] = parts.get(name, 0.0) + t
    return Estimate(seconds, parts, waves)

"""What the machine lets a row reach at the most: the time that its bytes and operations take at the
bandwidth of the cache (or memory) that holds its working set and at the peak of its arithmetic.

A ceiling is the best of what was measured: anything that disturbs a measurement lowers it. So each
is measured before and after the rows that need it, all through the run, and longer where a row
comes near to it; shares are taken at the end, by the best of the whole run.
"""

import ctypes
import pathlib
from dataclasses import dataclass

from .. import _library
from .counts import Count

#: Kinds of traffic, by the share of written bytes.
MIXES = {"read": 0.0, "add": 1 / 3, "copy": 1 / 2, "write": 1.0}
#: A share above this is measured again before it is believed.
NEAR = 0.85


@dataclass(frozen=True)
class Ceiling:
    """The tighter of the bounds of a row."""

    seconds: float  # the least that the row can take
    bound: str  # "memory" or "arithmetic"
    where: str  # "L1", "L2", "L3", "memory"; or the type of the numbers, "float32"
    rate: float  # bytes or operations a second

    def as_json(self) -> dict:
        unit = "tbps" if self.bound == "memory" else "tflops"
        return {"bound": self.bound, "of": self.where, unit: round(self.rate * 1e-12, 5)}


class CpuProbe:
    """The library's own loops, on as many threads as the rows have."""

    least, quick_seconds = 16 << 10, 0.02

    def __init__(self, threads: int):
        self.threads = threads
        self.caches = cache_sizes(threads)
        # A virtual machine may have more of the last cache than it knows of.
        self.largest = grid(min(max(8 * max(self.caches.values(), default=0), 256 << 20), 1 << 30))
        self._bandwidth = _library.function(
            "fk_measure_bandwidth",
            ctypes.c_double,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_double,
        )
        self._flops = _library.function(
            "fk_measure_flops", ctypes.c_double, ctypes.c_char_p, ctypes.c_int32, ctypes.c_double
        )

    def bandwidth(self, mix: str, size: int, effort: float) -> float:
        seconds = self.quick_seconds * effort
        return self._bandwidth(mix.encode(), size, self.threads, seconds)

    def flops(self, dtype: str, effort: float) -> float:
        return self._flops(dtype.encode(), self.threads, self.quick_seconds * effort)

    def arithmetic(self, dtype: str) -> tuple:
        """Loops, the fastest of which bounds products of that type. float16 is computed on as
        float32, and so is bfloat16 where there are no dot products of it."""
        return {"bfloat16": ("float32", "bfloat16"), "int8": ("int8",)}.get(dtype, ("float32",))

    def working_set(self, count: Count) -> int:
        return count.working_set


class GpuProbe:
    """Plain calls of a framework, timed as the rows are. `sets_of(bytes)`: over how many sets of
    inputs a row of so many bytes rotates; `time(sets)`: the shortest time of each call, of which
    there are several of each name if the rows rotate at all."""

    least, largest = 1 << 20, 2 << 30
    product = 4096  # rows and columns of the matrices

    def __init__(self, framework, sets_of, time):
        self.framework, self.sets_of, self.time = framework, sets_of, time
        self.caches = framework.gpu_caches()
        self.rotates = sets_of(1) > 1

    def bandwidth(self, mix: str, size: int, effort: float) -> float:
        sets = 4 if self.rotates and size < self.largest else 1
        calls = [self.framework.traffic_call(mix, size // sets) for _ in range(sets)]
        return calls[0][1] / self.time([{mix: call} for call, _ in calls])[mix]

    def flops(self, dtype: str, effort: float) -> float:
        call = self.framework.gemm_call(self.product, dtype)
        return 2 * self.product**3 / self.time([{"gemm": call}])["gemm"]

    def arithmetic(self, dtype: str) -> tuple:
        return (dtype,)

    def working_set(self, count: Count) -> int:
        return count.working_set * self.sets_of(count.working_set)


class Ceilings:
    def __init__(self, probe):
        self.probe = probe
        self.bandwidths: dict = {}  # (mix, size): bytes a second
        self.peaks: dict = {}  # name: operations a second
        # What every result file has.
        self.always = [("copy", probe.largest), ("float32",)]

    def needs(self, count: Count, dtype: str) -> list[tuple]:
        """What has to be measured for such a row."""
        size = self._size(count)
        out = [(mix, size) for mix in self._mixes(count)]
        if count.flops:
            out += [(name,) for name in self._arithmetic(count, dtype)]
        return out

    def measure(self, needs, effort: float = 1.0) -> None:
        for need in needs:
            if len(need) == 2:
                value = self.probe.bandwidth(*need, effort)
                self.bandwidths[need] = max(value, self.bandwidths.get(need, 0.0))
            else:
                value = self.probe.flops(*need, effort)
                self.peaks[need[0]] = max(value, self.peaks.get(need[0], 0.0))

    def of(self, count: Count, dtype: str) -> Ceiling:
        rate = self._bandwidth(count)
        where = level(self._size(count), self.probe.caches)
        out = Ceiling(count.bytes / rate, "memory", where, rate)
        peaks = {n: self.peaks[n] for n in self._arithmetic(count, dtype) if self.peaks.get(n)}
        if count.flops and peaks:
            name = max(peaks, key=peaks.get)
            seconds = count.flops / peaks[name]
            if seconds > out.seconds:
                out = Ceiling(seconds, "arithmetic", name, peaks[name])
        return out

    def settle(self, rows: list[tuple], rounds: int = 6) -> None:
        """`rows`: (count, dtype, seconds). Measures again, longer and longer, what a row comes so
        near to that its ceiling may have been disturbed."""
        for i in range(rounds):
            near = {
                need
                for count, dtype, seconds in rows
                if self.of(count, dtype).seconds > (NEAR if i < 2 else 1.0) * seconds
                for need in self.needs(count, dtype)
            }
            if not near:
                return
            self.measure(sorted(near, key=str), effort=2.0 ** (i + 1))

    def as_json(self) -> dict:
        """Bandwidths in TB/s by the bytes of the working set, peaks in TFLOP/s."""
        by_mix: dict = {}
        for mix, size in sorted(self.bandwidths):
            value = round(self.bandwidths[mix, size] * 1e-12, 5)
            by_mix.setdefault(mix, {})[str(size)] = value
        peaks = {name: round(v * 1e-12, 5) for name, v in self.peaks.items() if v}
        return {
            "copy_tbps": by_mix.get("copy", {}).get(str(self.probe.largest), 0.0),
            "gemm_tflops": max(peaks.values(), default=0.0),
            "bandwidth_tbps": by_mix,
            "tflops": peaks,
            "caches": self.probe.caches,
        }

    def _arithmetic(self, count: Count, dtype: str) -> tuple:
        return self.probe.arithmetic(count.arithmetic or dtype)

    def _size(self, count: Count) -> int:
        working_set = self.probe.working_set(count)
        return grid(min(max(working_set, self.probe.least), self.probe.largest))

    def _mixes(self, count: Count) -> dict[str, float]:
        """The kinds of traffic just below and above the row's share of written bytes, and what
        share of the row's bytes each stands for, so that together they write as much as the row
        does. A row that reads nearly all of its bytes is so held against `read` alone, even where
        a processor moves more bytes when some of them are written. What is read and written in
        place may go either of two ways."""
        if count.in_place:
            return {"copy": 1.0, "update": 1.0}
        written = count.written / count.bytes if count.bytes else 0.0
        below = max((m for m in MIXES if MIXES[m] <= written), key=MIXES.get)
        above = min((m for m in MIXES if MIXES[m] >= written), key=MIXES.get)
        if below == above:
            return {below: 1.0}
        share = (written - MIXES[below]) / (MIXES[above] - MIXES[below])
        return {below: 1.0 - share, above: share}

    def _bandwidth(self, count: Count) -> float:
        """Of each kind of traffic the best at the row's size, or at a larger one, which is never
        quicker in truth; the times of the row's parts are added."""
        least, mixes = self._size(count), self._mixes(count)
        best = {
            mix: max(v for (m, size), v in self.bandwidths.items() if m == mix and size >= least)
            for mix in mixes
        }
        if count.in_place:
            return max(best.values())
        return 1.0 / sum(share / best[mix] for mix, share in mixes.items())


def grid(size: int) -> int:
    """The sizes at which bandwidth is measured: the largest power of 2, or 1.5 times one, that is
    not above `size`, so that no cache holds more of it than of the row's own."""
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if size >= power + power // 2 else power


def level(working_set: int, caches: dict) -> str:
    """The first of the caches that holds it, by name, or memory."""
    return next((name for name, size in caches.items() if working_set <= size), "memory")


def cache_sizes(threads: int, root: str = "/sys/devices/system/cpu/cpu0/cache") -> dict:
    """What the system says of the caches that so many threads have together: {"L1": bytes, ...}.
    Only names depend on it, no figure."""
    out = {}
    for folder in sorted(pathlib.Path(root).glob("index*")):
        try:
            kind, name, size, shared = (
                (folder / f).read_text().strip()
                for f in ("type", "level", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind == "Instruction":
            continue
        sharers = sum(
            int(b or a) - int(a) + 1 for a, _, b in (r.partition("-") for r in shared.split(","))
        )
        units = {"K": 1 << 10, "M": 1 << 20}
        each = int(size.rstrip("KM")) * units.get(size[-1], 1)
        out["L" + name] = each * -(-threads // sharers)
    return dict(sorted(out.items()))

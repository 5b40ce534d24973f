"""Whether the machine had other things to do while a row was timed: what the system's counters say
of other programs and of a virtual machine's neighbours, and how far apart the samples lie."""

import os
import time
from dataclasses import dataclass

#: A row is said to be disturbed above any of these.
OTHERS = 0.05  # the share of the CPUs it wants that other programs took
STEAL = 0.02  # the share of all CPU time that the host gave to others
SPREAD = 2.0  # p95 over p50


@dataclass(frozen=True)
class _Counters:
    at: float
    busy: float  # seconds of all CPUs together
    steal: float
    total: float
    own: float


class Watch:
    """Reads /proc/stat; where there is none, nothing is said."""

    def __init__(
        self, threads: int, stat="/proc/stat", loadavg="/proc/loadavg", own=None, clock=None
    ):
        self.threads, self.stat, self.loadavg = threads, stat, loadavg
        self.own = own or (lambda: sum(os.times()[:4]))
        self.clock = clock or time.perf_counter
        self.sums = {"seconds": 0.0, "others": 0.0, "steal": 0.0, "total": 0.0}
        self.load, self.runnable = self._load(), self._runnable()

    def _lines(self) -> list[list[str]]:
        try:
            with open(self.stat) as file:
                return [line.split() for line in file]
        except OSError:
            return []

    @property
    def cpus(self) -> int:
        return sum(1 for w in self._lines() if w and w[0].startswith("cpu") and w[0] != "cpu")

    def _load(self) -> float:
        """Programs that wanted a CPU over the last minute, on average."""
        try:
            with open(self.loadavg) as file:
                return float(file.read().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0

    def _runnable(self) -> int:
        """Programs other than this one that want a CPU right now."""
        count = next((int(w[1]) for w in self._lines() if w and w[0] == "procs_running"), 1)
        return max(count - 1, 0)

    def start(self) -> _Counters | None:
        fields = next((w for w in self._lines() if w and w[0] == "cpu"), None)
        if fields is None:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal; guests are part of user.
        t = [int(x) / tick for x in fields[1:9]] + [0.0] * (9 - len(fields))
        busy = t[0] + t[1] + t[2] + t[5] + t[6]
        return _Counters(self.clock(), busy, t[7], sum(t), self.own())

    def since(self, before: _Counters | None) -> dict:
        """CPUs' worth of other programs' work, and the share that was stolen, since then."""
        now = self.start() if before else None
        if now is None or now.at <= before.at:
            return {}
        seconds, total = now.at - before.at, now.total - before.total
        others = max(0.0, (now.busy - before.busy) - (now.own - before.own))
        steal = now.steal - before.steal
        for name, value in zip(self.sums, (seconds, others, steal, total), strict=True):
            self.sums[name] += value
        return {
            "others_cpus": round(others / seconds, 2),
            "steal": round(steal / total, 3) if total > 0 else 0.0,
        }

    def taken(self, others_cpus: float) -> float:
        """The share of the CPUs we want that others had. What they do on CPUs that we leave idle
        is no matter."""
        return max(0.0, others_cpus + self.threads - self.cpus) / self.threads

    def reasons(self, seen: dict, ms: dict) -> list[str]:
        """Why a row's times are to be taken with a grain of salt; none: they are not."""
        out = []
        if seen and self.taken(seen["others_cpus"]) > OTHERS:
            out.append(f"other programs took {seen['others_cpus']:.1f} of {self.cpus} CPUs")
        if seen and seen["steal"] > STEAL:
            out.append(f"{100 * seen['steal']:.0f}% of the CPU time was stolen")
        if ms["p50"] > 0 and ms["p95"] > SPREAD * ms["p50"]:
            out.append(f"p95 is {ms['p95'] / ms['p50']:.1f} times p50")
        return out

    def summary(self) -> dict:
        """Of the whole suite, while its rows were timed."""
        if not self.sums["seconds"]:
            return {}
        others = self.sums["others"] / self.sums["seconds"]
        steal = self.sums["steal"] / self.sums["total"] if self.sums["total"] else 0.0
        return {
            "cpus": self.cpus,
            "others_cpus": round(others, 2),
            "steal": round(steal, 3),
            "load_at_start": self.load,
            "runnable_at_start": self.runnable,
            "busy": self.taken(others) > OTHERS or steal > STEAL,
        }

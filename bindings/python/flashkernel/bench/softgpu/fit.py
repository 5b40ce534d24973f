"""Fits the constants of model.py to measured rows: `python -m flashkernel.bench.softgpu.fit
results/softgpu/measured.json` prints them, and the error of each suite. Every other row is fitted
to, and the error is that of the rows between."""

import json
import math
import pathlib
import sys

from . import chips, model
from .machine_code import with_registers

#: Between what each constant may lie.
LIMITS = {
    "wgmma": (0.4, 1.0), "mma": (0.2, 1.0), "issue": (0.6, 1.3), "fma": (0.6, 1.2),
    "integer": (0.6, 2.0), "special": (0.5, 1.2), "load_store": (0.5, 1.2), "L2": (0.3, 1.0),
    "memory": (0.7, 1.0), "power": (1.5, 8.0), "launch_seconds": (5e-7, 5e-6),
    "next_launch_seconds": (2e-7, 3e-6), "warp_clocks": (0.5, 20.0),
    "load_clocks": (10.0, 1000.0), "barrier_clocks": (5.0, 200.0),
}  # fmt: skip


def ratio(row: dict, fitted: dict = model.FITTED) -> float:
    """The estimate over what was measured."""
    return 1e3 * model.of_call(row["launches"], chips.H200, fitted).seconds / row["ms"]


def off(r: float) -> float:
    """How far a ratio is from 1, as a share: 0.25 is a quarter too much, or a fifth too little."""
    return max(r, 1 / r) - 1


def median(values) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def loss(rows: list[dict], fitted: dict) -> float:
    """The mean of the logarithms' errors, each cut where a row is hopeless."""
    return sum(min(abs(math.log(ratio(row, fitted))), 1.0) for row in rows) / len(rows)


def fit(rows: list[dict], rounds: int = 6) -> dict:
    """One constant after the other, by smaller and smaller steps."""
    best = dict(model.FITTED)
    least = loss(rows, best)
    step = 1.3
    for _ in range(rounds):
        moved = True
        while moved:
            moved = False
            for name, (low, high) in LIMITS.items():
                for factor in (step, 1 / step):
                    tried = {**best, name: min(high, max(low, best[name] * factor))}
                    if (error := loss(rows, tried)) < least - 1e-6:
                        best, least, moved = tried, error, True
        step = step**0.5
    return best


def table(rows: list[dict], fitted: dict) -> list[str]:
    lines = []
    groups = sorted({(row["suite"], row["op"], row["impl"]) for row in rows})
    for group in groups:
        ratios = [ratio(r, fitted) for r in rows if (r["suite"], r["op"], r["impl"]) == group]
        within = sum(off(r) <= 0.25 for r in ratios)
        lines.append(
            f"{' '.join(group):60} {len(ratios):4} rows, {within:4} within 25%, estimate over "
            f"measured {median(ratios):.2f}"
        )
    return lines


def main() -> int:
    path = pathlib.Path(sys.argv[1])
    rows = with_registers(json.loads(path.read_text())["rows"], path.parent)
    fitted = fit(rows[::2])
    for name, value in fitted.items():
        print(f'    "{name}": {value:.3g},')
    print(*table(rows, fitted), sep="\n")
    for title, part in (("fitted to", rows[::2]), ("not fitted to", rows[1::2])):
        errors = [off(ratio(row, fitted)) for row in part]
        within = sum(e <= 0.25 for e in errors)
        print(f"{title}: {len(part)} rows, half within {100 * median(errors):.0f}%, "
              f"{100 * within / len(part):.0f}% of the rows within 25%")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Counters beside those of a committed file: what became worse."""

import json

#: Of each figure, what is allowed beyond the committed one, as a share of it. Another compiler may
#: arrange arithmetic otherwise; what moves data and the matrix products are the kernel's own.
WORSE = {
    "launches": 0.0,
    "tensor_flops": 0.0,
    "tensor_instructions": 0.0,
    "bank_conflicts": 0.0,
    "memory_bytes": 0.005,
    "global_load_bytes": 0.005,
    "global_store_bytes": 0.005,
    "global_atomic_bytes": 0.005,
    "global_load_sectors": 0.005,
    "global_store_sectors": 0.005,
    "shared_load_wavefronts": 0.01,
    "shared_store_wavefronts": 0.01,
    "barriers": 0.01,
    "warp_instructions": 0.03,
}


def key(row: dict) -> str:
    return json.dumps([row["chip"], row["op"], row["case"]], sort_keys=True)


def name(row: dict) -> str:
    case = " ".join(
        k if v is True else f"{k}={v}" for k, v in row["case"].items() if v is not False
    )
    return f"{row['chip']}: {row['op']} {case}"


def regressions(rows: list[dict], committed: list[dict]) -> list[str]:
    """A line for each figure that became worse, and for each row that the file does not have."""
    known = {key(row): row for row in committed}
    lines = []
    for row in rows:
        before = known.get(key(row))
        if before is None:
            lines.append(f"{name(row)}: no such row in the file")
            continue
        for figure, more in WORSE.items():
            if row[figure] > before[figure] * (1 + more):
                lines.append(f"{name(row)}: {figure}: {row[figure]}, was {before[figure]}")
    return lines

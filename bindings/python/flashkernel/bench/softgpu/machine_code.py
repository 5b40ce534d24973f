"""What the machine code of a kernel shows, from results/softgpu/machine_code.json, which
tools/machine_code.py writes."""

import json
import pathlib

#: What code each chip runs; the first that a kernel has.
ARCHITECTURES = {
    "T4": ("sm_75",),
    "A100": ("sm_80",),
    "H100": ("sm_90a", "sm_90"),
    "H200": ("sm_90a", "sm_90"),
}


def facts(folder) -> dict:
    """A row for each (architecture, kernel); empty where the folder has no such file."""
    path = pathlib.Path(folder, "machine_code.json")
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(row["architecture"], row["kernel"]): row for row in rows}


def of(kernel: str, chip: str, known: dict) -> dict | None:
    found = (known.get((architecture, kernel)) for architecture in ARCHITECTURES[chip])
    return next((row for row in found if row), None)


def with_registers(rows: list[dict], folder) -> list[dict]:
    """The rows, whose launches know their registers: how many blocks a multiprocessor holds depends
    on them."""
    known = facts(folder)
    for row in rows:
        for launch in row["launches"]:
            if fact := of(launch["kernel"], row["chip"], known):
                launch["registers"] = fact["registers"]
    return rows

"""The counters of the software H200 beside what ncu counted on a real one for the same calls
(results/h200/ncu/launches.json, written by launches.py; attention.csv, of two large calls).

They count the same thing where the compiler behind the PTX left the accesses as they were. It joins
some neighbouring ones to a wider one and leaves out others, which the number of instructions shows:
only where that is the chip's too are the sectors and the passes that they take compared."""

import json
import os
import pathlib

import pytest
import torch

import flashkernel as fk
import launches
import software_gpu

pytestmark = pytest.mark.skipif(
    os.environ.get("FK_SOFTGPU_ARCH") != "90", reason="the figures are a Hopper's"
)
FIGURES = pathlib.Path(__file__).parents[2] / "results/h200/ncu"
ROWS = {
    row["call"]: row["launches"]
    for row in json.loads((FIGURES / "launches.json").read_text())["rows"]
}


@pytest.fixture(scope="module")
def counted():
    """For each call, its launches with their counters."""
    made = {}
    for name, call in launches.calls(torch, fk, "cpu"):
        with software_gpu.launches() as made[name]:
            call()
    return made


def shape(text: str) -> list:
    """ncu's "(64, 1, 1)"."""
    return json.loads(text.replace("(", "[").replace(")", "]"))


@pytest.mark.parametrize("call", ROWS)
def test_launches_are_those_of_the_chip(call, counted):
    on_chip = [(shape(row["grid"]), shape(row["block"])) for row in ROWS[call]]
    assert [(launch["grid"], launch["block"]) for launch in counted[call]] == on_chip

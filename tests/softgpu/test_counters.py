"""The counters of the software H200 beside what ncu counted on a real one for the same calls
(results/h200/ncu/launches.json, written by launches.py; attention.csv, of two large calls).

They count the same thing where the compiler behind the PTX left the accesses as they were. It joins
some neighbouring ones to a wider one and leaves out others, which the number of instructions shows:
only where that is the chip's too are the sectors and the passes that they take compared."""

import csv
import json
import os
import pathlib

import pytest
import torch

import flashkernel as fk
import launches
import software_gpu
from flashkernel.bench.softgpu import device

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("FK_SOFTGPU_ARCH") != "90", reason="the figures are a Hopper's"
    ),
    pytest.mark.xdist_group("counters"),  # one worker counts, not each of them
]
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


def alike(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= 0.02 * max(ours, theirs)


def instructions(counters: dict, *beginnings: str) -> int:
    """How many ran whose mnemonic begins so."""
    return sum(n for name, n in counters["by_opcode"].items() if name.startswith(beginnings))


def compared(counters: dict, metrics: dict):
    """(what, ours, the chip's), each of accesses that both make equally often. What the copy engine
    moves is not among the chip's loads and stores, nor is what cp.async puts into shared memory."""
    for way, short in (("load", "ld"), ("store", "st")):
        by_threads = {
            what: counters[f"global_{way}_{what}"] - counters[f"copied_{way}_{what}"]
            for what in ("requests", "sectors")
        }
        chips = {
            what: metrics[f"l1tex__t_{what}_pipe_lsu_mem_global_op_{short}.sum"]
            for what in by_threads
        }
        if alike(by_threads["requests"], chips["requests"]):
            yield f"global {way} sectors", by_threads["sectors"], chips["sectors"]
        if way == "store" and instructions(counters, "cp.async.ca", "cp.async.cg"):
            continue
        ours = instructions(counters, f"{short}.shared", f"{short}.volatile.shared")
        if alike(ours, metrics[f"smsp__inst_executed_op_shared_{short}.sum"]):
            passes = f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{short}.sum"
            yield f"shared {way} passes", counters[f"shared_{way}_wavefronts"], metrics[passes]


def of_call(call: str, counted: dict) -> list:
    """(kernel, what, ours, the chip's) of a call."""
    return [
        (row["kernel"], *figures)
        for launch, row in zip(counted[call], ROWS[call], strict=True)
        for figures in compared(launch["counters"], row["metrics"])
    ]


@pytest.mark.parametrize("call", ROWS)
def test_counters_are_those_of_the_chip(call, counted):
    wrong = [
        f"{kernel}: {what}: {ours}, ncu counted {theirs:.0f}"
        for kernel, what, ours, theirs in of_call(call, counted)
        if not alike(ours, theirs)
    ]
    assert not wrong, "\n".join(wrong)


def test_most_is_compared(counted):
    """Of two figures a launch for each memory: nearly all of global, most of shared memory."""
    figures = [what for call in ROWS for _, what, *_ in of_call(call, counted)]
    most = 2 * sum(len(rows) for rows in ROWS.values())
    assert sum("global" in what for what in figures) > 0.95 * most
    assert sum("shared" in what for what in figures) > 0.6 * most


def test_large_launches_are_those_of_the_chip():
    """The calls of attention.csv: two sequences of 8192, 16 heads of 128, bfloat16, whole and
    causal. Its other columns are times and traffic with DRAM, which nobody counts here."""
    on_chip = {}
    with open(FIGURES / "attention.csv") as text:
        for row in csv.DictReader(text):
            on_chip[row["ID"]] = [shape(row["Grid Size"]), shape(row["Block Size"])]
    q, k, v = (torch.zeros(2, 8192, 16, 128, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with device.launches(0) as made:  # no block runs
        for causal in (False, True):
            out = fk.attention(*leaves, causal=causal)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    # ncu was not asked for the kernel that makes dq bfloat16.
    listed = [launch for launch in made if "convert_kernel" not in launch["name"]]
    assert [[launch["grid"], launch["block"]] for launch in listed] == list(on_chip.values())

"""The counters of the software H200 beside what ncu counted on a real one for the same calls
(results/h200/ncu/launches.json, written by launches.py)."""

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
FIGURES = pathlib.Path(__file__).parents[2] / "results/h200/ncu/launches.json"
ROWS = {row["call"]: row["launches"] for row in json.loads(FIGURES.read_text())["rows"]}

# ncu's metric and ours, which count the same thing.
SAME = {
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "global_load_requests",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "global_store_requests",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "global_load_sectors",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "global_store_sectors",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "shared_load_wavefronts",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "shared_store_wavefronts",
}


@pytest.fixture(scope="module")
def calls():
    return dict(launches.calls(torch, fk, "cpu"))


def shape(text: str) -> list:
    """ncu's "(64, 1, 1)"."""
    return json.loads(text.replace("(", "[").replace(")", "]"))


@pytest.mark.parametrize("call", ROWS)
def test_launches_are_those_of_the_chip(call, calls):
    with software_gpu.launches() as made:
        calls[call]()
    on_chip = [(shape(row["grid"]), shape(row["block"])) for row in ROWS[call]]
    assert [(launch["grid"], launch["block"]) for launch in made] == on_chip


@pytest.mark.parametrize("call", ROWS)
def test_counters_are_those_of_the_chip(call, calls):
    with software_gpu.launches() as made:
        calls[call]()
    wrong = []
    for launch, row in zip(made, ROWS[call], strict=True):
        for metric, name in SAME.items():
            ours, theirs = launch["counters"][name], row["metrics"][metric]
            if abs(ours - theirs) > 0.02 * max(ours, theirs):
                wrong.append(f"{row['kernel']}: {name}: {ours}, ncu counted {theirs:.0f}")
    assert not wrong, "\n".join(wrong)

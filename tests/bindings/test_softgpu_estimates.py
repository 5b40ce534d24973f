"""The counters' files and the estimates made of them: arithmetic, and the error on measured rows.
None of it needs the software GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from flashkernel.bench.softgpu import chips, fit, model, page
from flashkernel.bench.softgpu.compare import WORSE, regressions
from flashkernel.bench.softgpu.full_size import parabola, products, sampled
from flashkernel.bench.softgpu.machine_code import with_registers

RESULTS = pathlib.Path(__file__).parents[2] / "results/softgpu"


def launch(**more):
    """One that asks for nothing, of a block on every multiprocessor of an H200."""
    return {"kernel": "k", "blocks": 132, "threads": 128, "shared_bytes": 0, **more}


PEAK = {**model.FITTED, **dict.fromkeys(("wgmma", "mma", "issue", "fma", "integer", "special",
                                         "load_store", "L2", "memory"), 1.0)}  # fmt: skip


def test_each_unit_needs_what_its_peak_allows():
    h = chips.H200
    one_second = h.clock * h.multiprocessors

    def unit(name, **counters):
        return model.units(launch(**counters), h, PEAK)[name]

    assert unit("tensor", **{"flops wgmma bf16": 4096 * one_second}) == pytest.approx(1)
    assert unit("tensor", **{"flops mma tf32": 2048 * one_second}) == pytest.approx(1)
    assert unit("issue", warp_instructions=4 * one_second) == pytest.approx(1)
    floats = {"class fma": 3 * one_second, "class float": one_second}
    assert unit("fma", **floats) == pytest.approx(1)
    assert unit("special", **{"class special": one_second / 2}) == pytest.approx(1)
    assert unit("load_store", shared_load_wavefronts=one_second) == pytest.approx(1)
    assert unit("memory", memory_bytes=4.8e12) == pytest.approx(1)
    assert unit("L2", global_load_sectors=h.l2 / 32) == pytest.approx(1)


def test_the_fullest_multiprocessor_decides():
    def issue(blocks):
        busy = launch(blocks=blocks, warp_instructions=1e6 * blocks)
        return model.units(busy, chips.H200)["issue"]

    assert issue(1) == issue(132) == pytest.approx(issue(133) / 2)
    # Half of the multiprocessors have nothing to do: the same work takes twice as long.
    whole = model.units(launch(warp_instructions=1e9), chips.H200)["issue"]
    assert model.units(launch(blocks=66, warp_instructions=1e9), chips.H200)["issue"] == 2 * whole


def test_what_a_multiprocessor_holds():
    assert model.resident(launch(), chips.H200) == 16
    assert model.resident(launch(), chips.T4) == 8
    assert model.resident(launch(shared_bytes=100 << 10), chips.H200) == 2
    assert model.resident(launch(registers=255), chips.H200) == 2
    assert model.resident(launch(threads=1024), chips.A100) == 2


def test_the_slowest_unit_binds_and_launches_add_up():
    slow = launch(memory_bytes=4.8e9, warp_instructions=1e6)
    one = model.of_call([slow], chips.H200)
    assert one.binds == "memory"
    assert one.seconds > one.units["memory"] > 1e-3
    two = model.of_call([slow, slow], chips.H200)
    gap = model.FITTED["launch_seconds"] - model.FITTED["next_launch_seconds"]
    assert two.seconds == pytest.approx(2 * one.seconds - gap)
    # A T4's memory is fifteen times as slow.
    assert model.of_call([slow], chips.T4).seconds > 10 * one.seconds


def test_full_size_counters():
    assert parabola((1, 2, 3), [1, 4, 9], 10) == pytest.approx(100)
    flops = products({
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 3,
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16": 4,
        "fma.rn.f32": 7,
    })  # fmt: skip
    assert flops == {"mma bf16": 3 * 2 * 16 * 8 * 16, "wgmma f16": 2 * 64 * 128 * 16}
    counters = dict.fromkeys(
        (
            "warp_instructions", "global_load_bytes", "global_store_bytes", "global_atomic_bytes",
            "global_load_requests", "global_load_sectors", "global_store_requests",
            "global_store_sectors", "shared_load_wavefronts", "shared_store_wavefronts", "barriers",
        ),
        5,
    )  # fmt: skip
    counters |= {"blocks": 40, "blocks_run": 4, "by_class": {"fma": 2}, "by_opcode": {}}
    # Each block reads all of one tensor of 1000 bytes, and its own tenth of another.
    counters["touched"] = [[1000, 1000], [400, 4000]]
    whole = sampled({
        "name": "void f<(int)3>(A)", "grid": [10, 4, 1], "block": [64, 1, 1], "shared_bytes": 8,
        "counters": counters,
    })  # fmt: skip
    assert (whole["kernel"], whole["blocks"], whole["threads"]) == ("f<3>", 40, 64)
    assert (whole["warp_instructions"], whole["class fma"]) == (50, 20)
    assert whole["memory_bytes"] == 1000 + 4000


def row(**figures):
    case = {"L": 64, "causal": True, "dtype": "float16"}
    of_case = {"chip": "T4", "op": "attention_fwd", "case": case}
    return {**of_case, **dict.fromkeys(WORSE, 100), **figures}


def test_what_became_worse_is_named():
    assert regressions([row()], [row()]) == []
    assert regressions([row(memory_bytes=50, warp_instructions=102)], [row()]) == []
    for figure, more in WORSE.items():
        (line,) = regressions([row(**{figure: 100 * (1 + more) + 1})], [row()])
        assert line.startswith(f"T4: attention_fwd L=64 causal dtype=float16: {figure}: 10")
    assert "no such row" in regressions([row()], [])[0]


def test_estimates_of_measured_rows():
    """Half of the rows within a quarter: what the page claims of its estimates."""
    rows = json.loads((RESULTS / "measured.json").read_text())["rows"]
    with_registers(rows, RESULTS)
    assert len(rows) > 250
    for part in (rows, rows[1::2]):  # the second half was not fitted to
        errors = [fit.off(fit.ratio(row)) for row in part]
        assert fit.median(errors) <= 0.25, "\n".join(fit.table(rows, model.FITTED))


def test_page_shows_what_binds(tmp_path):
    rows = json.loads((RESULTS / "full_size.json").read_text())["rows"]
    counted = json.loads((RESULTS / "attention.json").read_text())["rows"]
    page.write(tmp_path / "page.html", counted, rows, RESULTS)
    text = (tmp_path / "page.html").read_text()
    assert "Estimates, not measurements" in text
    for chip in chips.CHIPS:
        assert f"{chip}: attention_fwd" in text
    assert "<h2>Machine code</h2>" in text
    # One cell of each estimate is marked.
    assert text.count("class=binds") == len(page.estimates(rows))


def test_a_library_without_it_says_how_to_build_one():
    if "FK_SOFTGPU_ARCH" in os.environ:
        pytest.skip("this library has a software GPU")
    done = subprocess.run(
        [sys.executable, "-m", "flashkernel.bench", "rows", "--device", "softgpu"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "has no software GPU in it" in done.stderr and "ninja -C build softgpu" in done.stderr

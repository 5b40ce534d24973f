"""`fk bench --device softgpu`: counters of quick cases beside the committed ones, on every chip."""

import os
import pathlib

import pytest

from flashkernel.bench.softgpu import command, count, device, full_size
from flashkernel.bench.softgpu.cases import CHIPS, SAMPLED, SUITES
from flashkernel.bench.softgpu.compare import regressions
from flashkernel.bench.suites import Case

# Counts for all chips, so that one of the runs by chip does it; in another order than the usual one
# loops that wait would count otherwise.
pytestmark = [
    pytest.mark.skipif(
        not device.present()
        or os.environ.get("FK_SOFTGPU_ARCH") != "90"
        or "FK_SOFTGPU_SEED" in os.environ,
        reason="asks the library for its software GPU, in the usual order",
    ),
    pytest.mark.xdist_group("bench"),  # one worker counts, not each of them
]
RESULTS = pathlib.Path(__file__).parents[2] / "results/softgpu"


@pytest.fixture(scope="module")
def rows():
    suites = [name for name in SUITES if name != SAMPLED]
    counted, failed = command.count(suites, list(CHIPS.values()), quick=True)
    assert not failed
    return counted


def test_counters_are_no_worse_than_the_committed_ones(rows):
    worse = []
    for suite in {row["suite"] for row in rows}:
        counted = [row for row in rows if row["suite"] == suite]
        worse += regressions(counted, command.read(RESULTS, suite))
    assert not worse, (
        "\n".join(worse) + "\n\nWhere the change is wanted, write the files anew: FK_LIBRARY=build/"
        "libflashkernel_softgpu.so fk bench --device softgpu --json results/softgpu"
    )


def test_every_chip_and_suite_is_counted(rows):
    counted = {(row["chip"], row["suite"]) for row in rows}
    assert counted == {(c, s) for c in CHIPS.values() for s in SUITES if s != SAMPLED}


def test_a_second_count_is_the_same(rows):
    again, _ = command.count(["conv1d"], ["T4"], quick=True)
    assert again == [r for r in rows if (r["suite"], r["chip"]) == ("conv1d", "T4")]
    assert len(again) == 2


def test_nothing_reads_or_computes_less_than_the_least(rows):
    for row in rows:
        assert row["bytes_over_least"] > 0.98, row
        # The first chunk of ssd's scan has no state to multiply, the last one none to make, which
        # the formula does not leave out: of a sequence of one chunk, both products with states.
        one_chunk = row["op"] == "ssd_fwd" and row["case"]["L"] <= 64
        least = 0.6 if one_chunk else 0.9 if row["op"] == "ssd_fwd" else 1.0
        assert row.get("flops_over_least", least) >= least or row["tensor_flops"] == 0, row


def test_a_copy_takes_as_many_sectors_as_its_bytes(rows):
    (row,) = (r for r in rows if (r["op"], r["impl"]) == ("linear_fwd", "cuda_sm90"))
    assert row["async_copies"] > 0
    assert 32 * row["global_load_sectors"] == row["global_load_bytes"]
    assert 32 * row["global_store_sectors"] == row["global_store_bytes"]


def without_shape(launch):
    return {k: v for k, v in launch.items() if k not in ("kernel", "blocks")}


def test_a_long_sequence_counts_what_short_ones_say():
    """Hopper's attention, by the parabola through short lengths and counted whole."""
    sizes = {"B": 1, "L": 2048, "H": 1, "D": 64, "causal": True}
    case = Case("attention", "fwd", "float16", tuple(sizes.items()))
    (continued,) = full_size.launches_of(case, continued=True, known={})
    (whole,) = map(full_size.sampled, count.counters_of(count.calls_of(case)[2]))
    assert continued["kernel"] == whole["kernel"] and continued["blocks"] == whole["blocks"]
    assert without_shape(continued) == pytest.approx(without_shape(whole), rel=0.003)


@pytest.mark.parametrize("op", ["softmax", "linear"])
def test_a_sample_says_what_all_blocks_count(op):
    sizes = {"rows": 4096, "cols": 256} if op == "softmax" else {"M": 1024, "K": 128, "N": 1024}
    case = Case(op, "fwd", "float32", tuple(sizes.items()))
    (part,) = full_size.launches_of(case, continued=False, known={})
    (whole,) = map(full_size.sampled, count.counters_of(count.calls_of(case)[2]))
    assert part["blocks"] > 5 * full_size.SAMPLE
    assert without_shape(part) == pytest.approx(without_shape(whole), rel=0.02)

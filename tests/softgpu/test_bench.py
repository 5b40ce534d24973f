"""`fk bench --device softgpu`: counters of a quick subset beside the committed ones, on every chip."""

import os
import pathlib

import pytest

from flashkernel.bench.softgpu import command, device
from flashkernel.bench.softgpu.cases import CHIPS, SAMPLED, SUITES
from flashkernel.bench.softgpu.compare import regressions

# Counts for all chips, so that one of the runs by chip does it.
pytestmark = pytest.mark.skipif(
    not device.present() or os.environ.get("FK_SOFTGPU_ARCH") != "90",
    reason="asks the library for its software GPU",
)
RESULTS = pathlib.Path(__file__).parents[2] / "results/softgpu"


@pytest.fixture(scope="module")
def rows():
    suites = [name for name in SUITES if name != SAMPLED]
    return command.count(suites, list(CHIPS.values()), quick=True)


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
    again = command.count(["conv1d"], ["T4"], quick=True)
    assert again == [r for r in rows if (r["suite"], r["chip"]) == ("conv1d", "T4")]
    assert len(again) == 2


def test_nothing_reads_or_computes_less_than_the_least(rows):
    for row in rows:
        assert row["bytes_over_least"] > 0.5, row
        assert row.get("flops_over_least", 1.0) >= 1.0 or row["tensor_flops"] == 0, row

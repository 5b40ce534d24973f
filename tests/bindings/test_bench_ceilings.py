"""What `fk bench` holds its rows against: ceilings, counts, and whether the machine was busy."""

import itertools
import os

import numpy as np
import pytest

import flashkernel as fk
from flashkernel.bench.__main__ import WORKLOADS, Bench, parse
from flashkernel.bench.busy import Watch
from flashkernel.bench.ceilings import Ceilings, CpuProbe, GpuProbe, cache_sizes, grid, level
from flashkernel.bench.counts import Count
from flashkernel.bench.frameworks import FRAMEWORKS
from flashkernel.bench.report import notes
from flashkernel.bench.suites import SUITES

# --- ceilings -------------------------------------------------------------------------------------


class Probe:
    """A machine of 100 GB/s up to 1 MiB and 10 GB/s beyond, of 1 TFLOP/s, twice that in bfloat16
    and four times in int8, which the first `disturbed` measurements of anything find at a tenth of
    it."""

    least, largest, caches = 1 << 14, 1 << 24, {"L1": 1 << 15, "L2": 1 << 20}

    def __init__(self, disturbed=0):
        self.disturbed, self.calls = disturbed, 0

    def _found(self, value):
        self.calls += 1
        return value / 10 if self.calls <= self.disturbed else value

    def bandwidth(self, mix, size, effort):
        return self._found(1e11 if size <= 1 << 20 else 1e10)

    def flops(self, name, effort):
        return self._found({"float32": 1e12, "bfloat16": 2e12, "int8": 4e12}[name])

    def arithmetic(self, dtype):
        return CpuProbe.arithmetic(self, dtype)

    def working_set(self, count):
        return count.working_set


def measured(probe, *counts, dtype="float32"):
    ceilings = Ceilings(probe)
    for count in counts:
        ceilings.measure(ceilings.needs(count, dtype))
    return ceilings


def test_the_tighter_bound_counts():
    small, large = Count(1 << 18, 1 << 18), Count(1 << 22, 1 << 22)
    sums = Count(1 << 10, 1 << 10, flops=10**9)
    ceilings = measured(Probe(), small, large, sums, dtype="bfloat16")
    assert ceilings.of(small, "bfloat16").seconds == pytest.approx((1 << 19) / 1e11)
    assert ceilings.of(small, "bfloat16").where == "L2"
    assert ceilings.of(large, "bfloat16").seconds == pytest.approx((1 << 23) / 1e10)
    assert ceilings.of(large, "bfloat16").where == "memory"
    assert ceilings.of(sums, "float32").seconds == pytest.approx(1e-3)
    assert ceilings.of(sums, "bfloat16").seconds == pytest.approx(5e-4)
    assert ceilings.of(sums, "bfloat16").as_json() == {
        "bound": "arithmetic",
        "of": "bfloat16",
        "tflops": 2.0,
    }


@pytest.mark.parametrize("kept, rate", [("float32", 1e12), ("bfloat16", 2e12), ("int8", 4e12)])
def test_weights_are_multiplied_as_they_are_kept(kept, rate):
    """Whatever the activations' dtype."""
    count = WORKLOADS["packed_linear"].count("fwd", {"M": 64, "K": 512, "N": 512, "kept": kept}, 4)
    ceiling = measured(Probe(), count).of(count, "float32")
    assert ceiling.seconds == pytest.approx(2 * 64 * 512 * 512 / rate)
    assert ceiling.as_json() == {"bound": "arithmetic", "of": kept, "tflops": rate * 1e-12}


def test_a_smaller_working_set_has_no_lower_ceiling():
    """Even where the small one was disturbed, and the large one was not."""
    sizes = [Count(3 << k, 0) for k in range(10, 24)]
    ceilings = measured(Probe(disturbed=6), *sizes)
    rates = [ceilings.of(count, "float32").rate for count in sizes]
    assert all(a >= b for a, b in itertools.pairwise(rates)) and rates[0] == 1e11


def test_the_machine_s_own_ceilings():
    probe = CpuProbe(threads=2)
    probe.quick_seconds = 1e-3
    counts = [Count(1 << k, 1 << k, flops=1) for k in (14, 18, 22, 25)]
    ceilings = measured(probe, *counts, dtype="bfloat16")
    rates = [ceilings.of(count, "bfloat16").rate for count in counts]
    assert all(a >= b > 0 for a, b in itertools.pairwise(rates))
    assert ceilings.peaks["float32"] > 0 and probe.flops("int8", 1.0) > 0
    assert probe.bandwidth("no such mix", 1 << 20, 1.0) == 0
    ceilings.measure(ceilings.always)
    assert ceilings.as_json()["copy_tbps"] > 0 and ceilings.as_json()["gemm_tflops"] > 0


@pytest.mark.parametrize("mix", ["read", "write", "copy", "add", "update"])
@pytest.mark.parametrize("size", [1, 5000, 1 << 20, (33 << 20) + 7])
def test_every_mix_at_every_size(mix, size):
    probe = CpuProbe(threads=3)
    assert probe.bandwidth(mix, size, 0.01) > 0


def test_sizes_and_levels():
    assert [grid(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 100)] == [1, 2, 3, 4, 4, 6, 6, 8, 96]
    assert level(5, {"L1": 5, "L2": 7}) == "L1"
    assert level(6, {"L1": 5, "L2": 7}) == "L2"
    assert level(8, {"L1": 5, "L2": 7}) == "memory"


def test_cache_sizes(tmp_path):
    shown = (("1", "Data", "32K", "0"), ("1", "Instruction", "64K", "0"),
             ("2", "Unified", "1024K", "0-1"), ("3", "Unified", "32M", "0-3,8-11"))  # fmt: skip
    for i, (number, kind, size, shared) in enumerate(shown):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        values = {"level": number, "type": kind, "size": size, "shared_cpu_list": shared}
        for name, text in values.items():
            (folder / name).write_text(text + "\n")
    mib = 1 << 20
    assert cache_sizes(4, tmp_path) == {"L1": mib // 8, "L2": 2 * mib, "L3": 32 * mib}
    assert cache_sizes(16, tmp_path)["L3"] == 64 * mib
    assert cache_sizes(4, tmp_path / "none") == {}


@pytest.mark.parametrize(
    "count, mixes",
    [
        (Count(8, 0), ["read"]),
        (Count(8, 1), ["read", "add"]),
        (Count(8, 4), ["add"]),
        (Count(8, 7), ["add", "copy"]),
        (Count(8, 8), ["copy"]),
        (Count(1, 8), ["copy", "write"]),
        (Count(0, 8), ["write"]),
        (Count(8, 8, in_place=8), ["copy", "update"]),
    ],
)
def test_mixes(count, mixes):
    assert [need[0] for need in Ceilings(Probe()).needs(count, "float32")] == mixes


class Uneven(Probe):
    """Reads alone at 5 GB/s, twice that where a third of the bytes are written."""

    def bandwidth(self, mix, size, effort):
        return {"read": 5e9, "add": 1e10, "copy": 8e9, "update": 9e9}[mix]


@pytest.mark.parametrize(
    "count, rate",
    [
        (Count(1 << 20, 0), 5e9),
        (Count(9999, 1), 5e9),  # a row of a linear layer: nothing but reads, nearly
        (Count(5, 1), 2 / (1 / 5e9 + 1 / 1e10)),  # half of it as `add`
        (Count(2, 1), 1e10),
        (Count(1, 1), 8e9),
        (Count(8, 8, in_place=8), 9e9),  # the better of two ways
    ],
)
def test_a_row_is_held_against_its_own_mix(count, rate):
    ceiling = measured(Uneven(), count).of(count, "float32")
    assert ceiling.rate == pytest.approx(rate, rel=1e-3)


def judged(probe, seconds):
    """A row that moves 8 MB, of which 10 GB/s make 0.84 ms."""
    made = Bench(parse(["--quick", "--framework", "numpy", "--op", "softmax"]))
    made.ceilings = Ceilings(probe)
    count = Count(1 << 22, 1 << 22)
    made.ceilings.measure(made.ceilings.needs(count, "float32"))
    ms = dict.fromkeys(("p50", "p95"), 1e3 * seconds)
    made.rows = [{"op": "x", "case": {"dtype": "float32"}, "ms": ms, "peers": {}}]
    made.asked = [(count, "float32", seconds)]
    made.judge()
    return made.rows[0]


def test_a_row_that_is_too_quick_is_flagged():
    row = judged(Probe(), 4e-4)
    assert row["impossible"] and row["percent_of_ceiling"] == pytest.approx(209.7, abs=0.1)
    assert any("cannot be" in note for note in notes({"rows": [row]}))
    row = judged(Probe(), 1e-3)
    assert not row["impossible"] and row["percent_of_ceiling"] == pytest.approx(83.9, abs=0.1)
    assert not any("cannot be" in note for note in notes({"rows": [row]}))


def test_a_ceiling_that_was_disturbed_is_measured_again():
    row = judged(Probe(disturbed=4), 1e-3)
    assert not row["impossible"] and row["percent_of_ceiling"] == pytest.approx(83.9, abs=0.1)


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("rotating", [False, True])
def test_ceilings_by_a_framework_s_own_kernels(name, rotating, monkeypatch):
    """As on a GPU, with calls on the CPU for want of one."""
    pytest.importorskip(name)
    framework = FRAMEWORKS[name]("cpu")
    monkeypatch.setattr(framework, "gpu_caches", lambda: {"L2": 1 << 22})
    timed = []

    def time(sets):
        assert len(sets) == (4 if rotating and "gemm" not in sets[0] else 1)
        timed.append(next(iter(sets[0])))
        for calls in sets:
            for call in calls.values():
                call()
        return dict.fromkeys(sets[0], 1e-3)

    probe = GpuProbe(framework, lambda size: 5 if rotating and size < 1 << 20 else 1, time)
    probe.product = 64
    counts = [Count(1 << 20, 0), Count(2 << 20, 1 << 20, 1), Count(8, 8, in_place=8), Count(0, 9)]
    ceilings = measured(probe, *counts)
    assert set(timed) == {"read", "add", "copy", "update", "write", "gemm"}
    # A millisecond for each call.
    size = 1 << 20
    sets = 4 if rotating else 1
    assert ceilings.bandwidths["add", 3 << 20] == pytest.approx((3 * size // sets) * 1e3, rel=0.01)
    assert ceilings.peaks["float32"] == pytest.approx(2 * 64**3 * 1e3)
    assert ceilings.of(counts[0], "float32").where == "L2"


# --- counts ---------------------------------------------------------------------------------------


def sizes(**named):
    return named


# By hand: (op, direction, params, bytes of an element, bytes read, bytes written, FLOPs, in place).
COUNTS = [
    # x and the residual of 2 x 3 floats, 3 weights; y and the sum; 4 + 1 operations each.
    ("rms_norm", "fwd", sizes(rows=2, cols=3, residual=True), 4, 60, 48, 30, 0),
    ("rms_norm", "fwd", sizes(rows=2, cols=3), 4, 36, 24, 24, 0),
    # dy, the sum and its gradient, weight, 2 numbers of rows; dx and dweight.
    ("rms_norm", "bwd", sizes(rows=2, cols=3, residual=True), 4, 92, 36, 60, 0),
    ("rms_norm", "bwd", sizes(rows=2, cols=3), 2, 12 + 12 + 6 + 8, 12 + 6, 54, 0),
    ("layer_norm", "fwd", sizes(rows=2, cols=3, residual=True), 4, 72, 48, 48, 0),
    ("layer_norm", "bwd", sizes(rows=2, cols=3, residual=True), 4, 100, 48, 84, 0),
    ("softmax", "fwd", sizes(rows=2, cols=3), 4, 24, 24, 30, 0),
    ("softmax", "bwd", sizes(rows=2, cols=3), 4, 48, 24, 24, 0),
    ("log_softmax", "fwd", sizes(rows=2, cols=3), 2, 12, 12, 30, 0),
    ("log_softmax", "bwd", sizes(rows=2, cols=3), 2, 24, 12, 24, 0),
    ("logsumexp", "fwd", sizes(rows=2, cols=3), 2, 12, 8, 24, 0),
    ("logsumexp", "bwd", sizes(rows=2, cols=3), 2, 12 + 16, 12, 18, 0),
    ("sum", "fwd", sizes(rows=2, cols=3), 4, 24, 8, 6, 0),
    ("sum", "bwd", sizes(rows=2, cols=3), 4, 8, 0, 0, 0),  # a view of dy
    ("max", "fwd", sizes(rows=2, cols=3), 4, 24, 8, 6, 0),
    ("max", "bwd", sizes(rows=2, cols=3), 4, 24 + 16, 24, 12, 0),
    ("cross_entropy", "fwd", sizes(rows=2, cols=3), 4, 24 + 8, 4, 24, 0),
    ("cross_entropy", "bwd", sizes(rows=2, cols=3), 4, 24 + 8 + 16, 24, 18, 0),
    # 2 rows of 3 by 5 rows of 3, without and with 5 biases and an activation whose input was kept.
    ("linear", "fwd", sizes(M=2, K=3, N=5), 2, 12 + 30, 20, 60, 0),
    ("linear", "bwd", sizes(M=2, K=3, N=5), 2, 12 + 30 + 20, 12 + 30, 120, 0),
    ("linear", "fwd", sizes(M=2, K=3, N=5, activation="gelu_tanh"), 2, 42 + 10, 20, 60, 0),
    ("linear", "bwd", sizes(M=2, K=3, N=5, activation="gelu_tanh"), 2, 62 + 20, 42 + 10, 120, 0),
    # Of 8-bit numbers a result in bfloat16; the few scales are left out.
    ("scaled_linear", "fwd", sizes(M=2, K=3, N=5), 1, 6 + 15, 20, 60, 0),
    # Two such weights; the backward reads dy, gate and up.
    ("gated_linear", "fwd", sizes(M=2, K=3, N=5), 2, 12 + 60, 20, 120, 0),
    ("gated_linear", "bwd", sizes(M=2, K=3, N=5), 2, 72 + 60, 12 + 60, 240, 0),
    # The weight as it is kept.
    ("packed_linear", "fwd", sizes(M=2, K=3, N=5, kept="float32"), 4, 24 + 60, 40, 60, 0),
    ("packed_linear", "fwd", sizes(M=2, K=3, N=5, kept="bfloat16"), 4, 24 + 30, 40, 60, 0),
    ("packed_linear", "fwd", sizes(M=2, K=3, N=5, kept="int8"), 4, 24 + 15, 40, 60, 0),
    # The same products, 2 targets; a loss, and of each row 2 numbers that the forward kept.
    ("linear_cross_entropy", "fwd", sizes(N=2, K=3, V=5), 4, 24 + 60 + 8, 4, 60, 0),
    ("linear_cross_entropy", "bwd", sizes(N=2, K=3, V=5), 4, 84 + 8 + 16, 84, 120, 0),
    # 2 positions, 3 heads of 4: 24 numbers, 2 x 2 cosines and as many sines.
    ("rope", "fwd", sizes(B=1, L=2, H=3, D=4), 2, 48 + 32, 48, 72, 0),
    ("rope", "bwd", sizes(B=1, L=2, H=3, D=4), 2, 48 + 32, 48, 72, 0),
    # 3 queries by 3 keys, 2 heads of 4: q, k, v and out of 24 numbers; 9 pairs a head of 2 (4 + 4).
    ("attention", "fwd", sizes(B=1, L=3, H=2, D=4, causal=False), 4, 288, 96, 288, 0),
    # Causal: 1 + 2 + 3 pairs.
    ("attention", "fwd", sizes(B=1, L=3, H=2, D=4, causal=True), 4, 288, 96, 192, 0),
    # One shared key head, values of 2: q 24, k 12, v 6, out 12 numbers.
    ("attention", "fwd", sizes(B=1, L=3, H=2, D=4, E=2, G=1, causal=False), 2, 84, 24, 216, 0),
    # 8-bit numbers in, bfloat16 out.
    ("attention", "fwd", sizes(B=1, L=3, H=2, D=4, causal=False), 1, 72, 48, 288, 0),
    # q, k, v, out, dout and 6 lse; dq, dk, dv; five products for two.
    ("attention", "bwd", sizes(B=1, L=3, H=2, D=4, causal=False), 4, 480 + 24, 288, 720, 0),
    ("attention", "bwd", sizes(B=1, L=3, H=2, D=4, causal=True), 4, 480 + 24, 288, 480, 0),
    # u, delta, z of 2 x 3, B and C of 2 x 5, A of 3 x 5, D and delta_bias of 3.
    ("selective_scan", "fwd", sizes(B=1, L=2, D=3, N=5), 2, 36 + 40 + 84, 12, 210, 0),
    ("selective_scan", "bwd", sizes(B=1, L=2, D=3, N=5), 2, 48 + 40 + 84, 36 + 40 + 84, 810, 0),
    # x of 2 x 3 heads of 4, dt of 2 x 3, B, C of 2 x 5, A, D and dt_bias of 3; a chunk of 2 steps.
    ("ssd", "fwd", sizes(B=1, L=2, H=3, P=4, N=5), 2, 48 + 12 + 40 + 36, 48, 548, 0),
    ("ssd", "bwd", sizes(B=1, L=2, H=3, P=4, N=5), 2, 136 + 48, 136, 1356, 0),
    # x of 2 x 3; 4 gates of 5 units, each with 3 + 5 weights and 2 biases; y of 2 x 5. A step of
    # training reads x twice, y and the weights twice, and does three times as much.
    ("lstm", "fwd", sizes(B=1, L=2, I=3, H=5), 4, 24 + 800, 40, 640, 0),
    ("lstm", "fwd", sizes(B=1, L=2, I=3, H=5, train=True), 4, 48 + 40 + 1600, 864, 1920, 0),
    ("gru", "fwd", sizes(B=1, L=2, I=3, H=5), 4, 24 + 600, 40, 480, 0),
    # Two layers of 5 units with as many inputs.
    ("lstm_step", "fwd", sizes(B=1, H=5, layers=2), 4, 1920 + 20, 20, 960, 0),
    ("gru_step", "fwd", sizes(B=1, H=5, layers=2), 4, 1440 + 20, 20, 720, 0),
    # x of 2 x 3, 3 x 4 taps, 3 biases.
    ("causal_conv1d", "fwd", sizes(B=1, L=2, D=3, W=4), 4, 24 + 60, 24, 48, 0),
    ("causal_conv1d", "bwd", sizes(B=1, L=2, D=3, W=4), 4, 48 + 60, 24 + 60, 144, 0),
    # The state of 2 x 3 x 5; x, dt, z of 2 x 3; B, C of 2 x 5; A of 3 x 5, D and dt_bias of 3.
    ("selective_state_update", "fwd", sizes(B=2, D=3, N=5), 2, 60 + 36 + 40 + 84, 72, 210, 60),
    # Two heads: one decay each.
    ("selective_state_update", "fwd", sizes(B=1, H=2, D=3, N=5), 2,
     60 + 36 + 20 + 8 + 48, 60 + 12, 150, 60),
    # 3 inputs before, of 3 channels, 2 sequences; x; 3 x 4 taps and 3 biases.
    ("causal_conv1d_update", "fwd", sizes(B=2, D=3, W=4), 4, 72 + 24 + 60, 72 + 24, 48, 72),
    # Two layers of 256 -> 2 x 512, 512 -> 48, 16 -> 512, 512 -> 256: 425984 products a token each,
    # and 512 channels of 4 taps, 16 states; 438016 parameters each with norm, conv, biases, A, D,
    # and the last norm.
    ("mamba_agent", "fwd", sizes(B=1, L=1, train=False), 4,
     4 * (256 + 2 * 438016 + 256), 1024, 2 * (2 * 425984 + 512 * (8 + 112)), 0),
    ("mamba_agent", "fwd", sizes(B=1, L=1, train=True), 4,
     4 * (512 + 2 * 438016 + 256), 12 * (2 * 438016 + 256),
     2 * (6 * 425984 + 512 * (8 + 112 + 24 + 432)) - 2 * 1024 * 256, 4 * (2 * 438016 + 256)),
    # 288 -> 256 with its bias, twice 256 -> 512 -> 256, and three norms: 598016 products for the
    # newest frame, which is all that it looks at.
    ("agent", "fwd", sizes(net="MLP", B=2, L=3), 4,
     4 * (2 * 288 + 599040), 4 * 2 * 256, 2 * 2 * 598016, 0),
    # In 8 bits the products' weights are bytes, biases and norms are not, and no peak is asked for.
    ("agent", "fwd", sizes(net="MLP", B=1, L=3, int8=True), 4,
     4 * 288 + 598016 + 4 * 1024, 4 * 256, 0, 0),
    # A GRU's own weights stay float32: twice 1536 x 256 with their biases.
    ("agent", "fwd", sizes(net="GRU", B=1, L=60, int8=True), 4,
     4 * 60 * 288 + 73728 + 4 * (256 + 3 * 256 + 2 * (1536 * 256 + 1536)), 4 * 256, 0, 0),
    ("agent_step", "fwd", sizes(net="MLP", B=1), 2, 2 * (288 + 599040), 2 * 256, 2 * 598016, 0),
    ("agent_training", "fwd", sizes(net="MLP", B=2, L=3), 4,
     4 * (2 * 288 + 3 * 599040), 12 * 599040, 3 * 2 * 2 * 598016, 12 * 599040),
]  # fmt: skip


@pytest.mark.parametrize("op, direction, params, size, read, written, flops, in_place", COUNTS)
def test_counts(op, direction, params, size, read, written, flops, in_place):
    count = WORKLOADS[op].count(direction, params, size)
    assert (count.read, count.written, count.flops, count.in_place) == (
        read,
        written,
        flops,
        in_place,
    )
    assert count.bytes == read + written and count.working_set == read + written - in_place


def test_every_case_of_every_suite_is_counted():
    """By hand for each op and direction, and for any sizes."""
    by_hand = {(op, direction) for op, direction, *_ in COUNTS}
    for name, suite in SUITES.items():
        for case in suite():
            assert (case.op, case.direction) in by_hand, f"{name}: {case.name}"
            count = WORKLOADS[case.op].count(case.direction, dict(case.params), 2)
            assert count.read > 0 and count.working_set > 0


def test_inputs_and_outputs_are_as_large_as_counted():
    """Of a row-wise op, what NumPy has in its hands."""
    params = {"rows": 5, "cols": 7, "residual": True}
    workload = WORKLOADS["rms_norm"]
    tensors = workload.inputs(params, np.random.default_rng(0))
    count = workload.count("fwd", params, 4)
    assert count.read == sum(t.nbytes for t in tensors.values())
    assert count.written == sum(t.nbytes for t in workload.ours(fk, tensors))


# --- a busy machine -------------------------------------------------------------------------------


class Machine:
    """Two CPUs whose counters a test winds on."""

    def __init__(self, folder, threads=2):
        self.stat, self.loadavg = folder / "stat", folder / "loadavg"
        self.loadavg.write_text("3.50 1.0 1.0 3/100 1\n")
        self.ticks = {"user": 0, "idle": 0, "steal": 0}
        self.now = self.own = 0.0
        self.write()
        self.watch = Watch(
            threads, self.stat, self.loadavg, own=lambda: self.own, clock=lambda: self.now
        )

    def write(self):
        t = self.ticks
        line = f"{t['user']} 0 0 {t['idle']} 0 0 0 {t['steal']} 0 0"
        self.stat.write_text(f"cpu  {line}\ncpu0 {line}\ncpu1 {line}\nprocs_running 4\n")

    def pass_time(self, seconds, own, others=0.0, steal=0.0):
        """Seconds of CPU time, as the system counts them."""
        tick = os.sysconf("SC_CLK_TCK")
        self.now += seconds
        self.own += own
        self.ticks["user"] += round((own + others) * tick)
        self.ticks["steal"] += round(steal * tick)
        self.ticks["idle"] += round((2 * seconds - own - others - steal) * tick)
        self.write()


QUIET = {"p50": 1.0, "p95": 1.1}


def test_a_quiet_machine(tmp_path):
    machine = Machine(tmp_path)
    before = machine.watch.start()
    machine.pass_time(10, own=19.9)
    seen = machine.watch.since(before)
    assert seen == {"others_cpus": 0.0, "steal": 0.0}
    assert machine.watch.reasons(seen, QUIET) == []
    assert machine.watch.summary()["busy"] is False


def test_other_programs_are_noticed(tmp_path):
    machine = Machine(tmp_path)
    before = machine.watch.start()
    machine.pass_time(10, own=10, others=8)
    seen = machine.watch.since(before)
    assert seen["others_cpus"] == 0.8
    assert machine.watch.reasons(seen, QUIET) == ["other programs took 0.8 of 2 CPUs"]
    summary = machine.watch.summary()
    assert summary["busy"] and summary["load_at_start"] == 3.5
    assert summary["runnable_at_start"] == 3
    said = notes({"rows": [], "busy": summary})
    assert any("This machine was busy" in note and "0.8 of 2 CPUs" in note for note in said)


def test_others_on_a_cpu_that_we_leave_idle_do_not_matter(tmp_path):
    machine = Machine(tmp_path, threads=1)
    before = machine.watch.start()
    machine.pass_time(10, own=10, others=9)
    assert machine.watch.reasons(machine.watch.since(before), QUIET) == []


def test_stolen_time_is_noticed(tmp_path):
    machine = Machine(tmp_path)
    before = machine.watch.start()
    machine.pass_time(10, own=15, steal=4)
    seen = machine.watch.since(before)
    assert seen["steal"] == 0.2
    assert machine.watch.reasons(seen, QUIET) == ["20% of the CPU time was stolen"]
    assert machine.watch.summary()["busy"]


def test_samples_far_apart_are_noticed(tmp_path):
    watch = Watch(2, tmp_path / "none", tmp_path / "none")  # where there are no counters, too
    assert watch.since(watch.start()) == {} and watch.summary() == {}
    assert watch.reasons({}, QUIET) == []
    assert watch.reasons({}, {"p50": 1.0, "p95": 3.0}) == ["p95 is 3.0 times p50"]

"""`fk bench agent`: that all compute the same, how often, and what the report says of it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import flashkernel as fk
from flashkernel.bench import frames, report
from flashkernel.bench.__main__ import WORKLOADS, kind_of
from flashkernel.bench.agent import NETS
from flashkernel.bench.agent_suite import cases
from flashkernel.bench.timing import time_cpu

EACH = pytest.mark.parametrize("net", NETS)


def tensors(op, length=9, **params):
    import torch

    params = {**params, "B": 2, "L": length}
    arrays = WORKLOADS[op].inputs(params, np.random.default_rng(0))
    return params, {k: torch.from_numpy(v.copy()) for k, v in arrays.items()}


@EACH
def test_peers_have_our_weights(net):
    """A window and a few steps, in torch's ops and on NumPy arrays."""
    torch = pytest.importorskip("torch")
    for op, calls in (("agent", 1), ("agent_step", 4)):
        params, t = tensors(op, net=net)
        bound = [WORKLOADS[op].bound(params) for _ in range(2)]  # each keeps what it made
        arrays = {k: v.numpy() for k, v in t.items()}
        with torch.no_grad():
            for _ in range(calls):
                ours, on_arrays = bound[0].ours(fk, t), bound[1].ours(fk, arrays)
                plain = bound[0].peers["torch"](torch, t)
        assert type(on_arrays) is np.ndarray
        for other in (ours, on_arrays):
            np.testing.assert_allclose(other, plain, rtol=1e-4, atol=2e-5)
        exact = bound[0].peers["float32"](torch, t) if op == "agent" else None
        assert exact is None or torch.equal(exact, ours)


@EACH
def test_a_step_of_training(net):
    """Forward, backward and AdamW on both sides: losses that fall alike."""
    torch = pytest.importorskip("torch")
    params, t = tensors("agent_training", net=net)
    bound = WORKLOADS["agent_training"].bound(params)
    losses = [[call(m, t).item() for _ in range(3)]
              for call, m in ((bound.ours, fk), (bound.peers["torch"], torch))]  # fmt: skip
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][2] != losses[0][0]


@EACH
def test_plain_steps_equal_the_plain_window(net):
    """For longer than attention's window, within which states must keep their shapes."""
    torch = pytest.importorskip("torch")
    from flashkernel.bench.agent_in_torch import PlainBackbone

    more = {"window": 5, "qk_norm": True} if net in ("Attention", "Jamba") else {}
    module = getattr(fk.torch.backbones, net)(20, 16, **more)
    plain = PlainBackbone(module.requires_grad_(False))
    x = torch.randn(2, 13, 20)
    expected, state = plain(x), plain.init_state(2)
    for t in range(13):
        shapes = [[s.shape for s in own] for own in state]
        out, state = plain.step(x[:, t], state)
        torch.testing.assert_close(out, expected[:, t], rtol=1e-4, atol=1e-5)
        assert [[s.shape for s in own] for own in state] == shapes


@pytest.mark.parametrize("op", ["agent", "agent_step"])
def test_a_peer_compiles_as_one_graph(op):
    """At its second call: what makes the network is no part of it."""
    torch = pytest.importorskip("torch")
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    for net in ("GRU", "Attention"):
        params, t = tensors(op, net=net)
        peer = WORKLOADS[op].bound(params).peers["torch"]
        torch.compiler.reset()
        compiled = torch.compile(lambda t, peer=peer: peer(torch, t), backend=count, dynamic=False)
        seen = []
        with torch.no_grad():
            for _ in range(4):
                compiled(t)
                seen.append(len(graphs))
        assert seen == [0, 1, 1, 1]
        graphs.clear()


def test_cases():
    """Peers that take them, tails where frames come one by one, and no ceiling for 8 bits."""
    for device in ("cpu", "cuda"):
        suite = list(cases(device))
        assert {dict(c.params)["net"] for c in suite} == set(NETS)
        for c in suite:
            params = dict(c.params)
            int8 = "int8" in params
            assert c.device == device and (device == "cpu" or not int8)
            assert c.runs == (10_000 if params["B"] == 1 else 0)
            assert "onnxruntime" not in c.peers or (c.dtype, int8, device) == (
                "float32", False, "cpu",
            )  # fmt: skip
            assert (
                c.frameworks == ("numpy", "torch")
                or int8
                or (c.dtype == "bfloat16" or c.op == "agent_training")
            )
            workload = WORKLOADS[c.op].bound(params)
            assert {p.removesuffix("_eager").removesuffix("_compile") for p in c.peers} <= set(
                workload.peers
            )
            count = workload.count("fwd", params, 4)
            assert (count.flops == 0) == int8 and count.bytes > 0
            if int8:
                whole = workload.count("fwd", {k: v for k, v in params.items() if k != "int8"}, 4)
                assert 0.25 * whole.bytes < count.bytes < whole.bytes


def test_peers_that_are_loops():
    """The bar is set by what a compiler makes of a loop, and the row says that it is one."""
    for net, loop in (("Mamba", True), ("Jamba", True), ("GRU", False), ("Attention", False)):
        window = WORKLOADS["agent"].bound({"net": net})
        assert kind_of("torch_eager", window) == (report.LOOP if loop else "")
        assert kind_of("torch_compile", window) == (report.UNROLLED if loop else "")
        assert kind_of("onnxruntime", window) == (report.UNROLLED if loop else "")
        assert kind_of("torch_eager", WORKLOADS["agent_step"].bound({"net": net})) == ""
        training = WORKLOADS["agent_training"].bound({"net": net})
        assert kind_of("torch_eager", training) == (report.LOOP if loop else "")
    row = row_of("Mamba", 1.0, 2.0)
    row["peers"] = {"torch_compile": {"ms": {"p50": 3.0}, "kind": report.UNROLLED},
                    "torch_eager": {"ms": {"p50": 2.0}, "kind": report.LOOP}}  # fmt: skip
    assert report.cells(row)[0] == "agent_fwd Mamba 1 x 60 float32"
    assert report.cells(row)[5:] == ["torch_compile #", "3000.0", "3.00x"]
    assert any(note.startswith("#: ") for note in report.notes({"rows": [row]}))


def test_ten_thousand_of_ours_beside_fewer_of_the_peers():
    runs = {"ours": 0, "peer": 0}

    def call(name):
        runs[name] += 1

    calls = {name: lambda name=name: call(name) for name in runs}
    times, counted = time_cpu(calls, 5, 10, 20.0, runs_of_first=95)
    assert counted == {"warmup": 5, "iterations": 100, "peer_iterations": 10}
    assert runs["ours"] == 105 and runs["peer"] >= 15 and set(times) == set(runs)
    # A peer that is slow has as many turns as the time allows.
    calls["peer"] = lambda: __import__("time").sleep(0.01)
    _, counted = time_cpu(calls, 2, 1000, 0.1, runs_of_first=95)
    assert 5 <= counted["peer_iterations"] <= 12 and counted["iterations"] >= 95


def row_of(net, p50, p99, op="agent", **more):
    sizes = {"net": net, "B": 1, **({"L": 60} if op == "agent" else {}), **more}
    return {
        "op": f"{op}_fwd", "case": {**sizes, "dtype": "float32", "framework": "torch"},
        "ms": {"p50": p50, "p99": p99}, "iterations": 10, "tbps": 0.1, "percent_of_ceiling": 1.0,
        "peers": {},
    }  # fmt: skip


def test_frame_budget():
    rows = [row_of("GRU", 0.5, 1.0), row_of("GRU", 0.1, 0.2, op="agent_step"),
            row_of("MLP", 1e-3, 500.0), row_of("GRU", 0.4, 1 / 0.6, int8=True)]  # fmt: skip
    rows += [row_of("GRU", 9.0, 9.0) | {"case": {"B": 32, "net": "GRU"}}, {"op": "x", "case": {}}]
    heading, gru, mlp, other, int8 = frames.lines(rows)
    assert "float32" in heading and "16.67" in heading and "int8" in other
    said = " ".join(gru.split())
    assert said == "GRU window of 60 0.500 1.000 6.0% one step 0.100 0.200 1.2%"
    assert "500.000" in mlp and "10.0%" in int8 and frames.lines(rows[-1:]) == []
    assert max(map(len, frames.lines(rows))) < 100
    plot = frames.svg(frames.budgets(rows)["float32"])
    assert plot.count("<rect") == 6 and ">16.67 ms<" in plot and "GRU, one step: p50 0.100" in plot
    widths = [float(w.partition('"')[0]) for w in plot.split('width="')[1:]]
    assert min(widths) >= 0 and max(widths) < 880


def test_on_arrays(tmp_path):
    """Without torch: a line for each backbone, and the plot."""
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    call = [sys.executable, "-m", "flashkernel.bench", "agent", "--quick", "--framework", "numpy"]
    call += ["--op", "agent_step", "--json", str(file), "--html", str(page)]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [(r["case"]["net"], r["case"]["B"]) for r in rows] == [
        (net, b) for net in NETS for b in (1, 32)
    ]
    ends = done.stdout.splitlines()[-len(NETS) :]
    assert [line.split()[0] for line in ends] == list(NETS)
    assert page.read_text().count("Frame budget, float32") == 1
    assert page.read_text().count('class="step"') == len(NETS)


def test_jax_is_refused():
    pytest.importorskip("jax")
    call = [sys.executable, "-m", "flashkernel.bench", "agent", "--framework", "jax"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2
    assert "agent: expected --device cpu or cuda and --framework numpy or torch" in done.stderr

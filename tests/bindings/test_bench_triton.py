"""`fk bench triton`: that its calls are right, in Triton's interpreter, and where it is refused."""

import subprocess
import sys

import numpy as np
import pytest

import flashkernel as fk
from flashkernel.bench.__main__ import WORKLOADS
from flashkernel.bench.triton_twins import TWINS, cases

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter (conftest.py)
TINY = {"B": 1, "L": 9, "H": 2, "M": 5, "K": 8, "N": 4}
SIZES = {"attention": {"D": 16}, "selective_scan": {"D": 3}, "ssd": {"P": 8}, "linear": {"N": 6}}


def test_every_kernel_is_tried():
    found = list(cases())
    assert {(c.op, c.direction, c.dtype) for c in found} == {
        (op, direction, dtype)
        for op in fk.triton.__all__
        for direction in ("fwd", "bwd")
        for dtype in ("bfloat16", "float32")
    }
    assert set(TWINS) == set(fk.triton.__all__)
    for c in found:
        assert (c.device, c.frameworks, c.peers) == ("cuda", ("torch",), ("triton",))
        count = WORKLOADS[c.op].count(c.direction, dict(c.params), 2)
        assert count.flops > 0 and count.bytes > 0
    assert len({c.name for c in found}) == len(found)


def distinct_calls():
    """One case for each way to call a kernel: its flags and options, not its sizes."""
    seen = {}
    for c in cases():
        options = tuple((k, v) for k, v in c.params if type(v) is not int)
        seen.setdefault((c.op, c.dtype, c.direction, options), c)
    return list(seen.values())


@pytest.mark.parametrize("case", distinct_calls(), ids=lambda c: c.name)
def test_twins_agree(case):
    """Ours and Triton's, forward and backward as they are timed, at a tiny size."""
    from flashkernel.bench.frameworks import Torch

    params = dict(case.params)
    for name, size in (TINY | SIZES[case.op]).items():
        params = {k: size if k == name else v for k, v in params.items()}
    framework = Torch(DEVICE)
    workload = WORKLOADS[case.op].bound(params)
    arrays = workload.inputs(params, np.random.default_rng(0))
    tensors = framework.tensors(arrays, case.dtype)
    functions = framework.functions(workload, ["triton"])
    assert set(functions) == {"ours", "triton"}
    results = []
    for name, function in functions.items():
        torch.manual_seed(0)  # a backward draws its gradients when it is made
        call = framework.calls({name: function}, workload, case.direction, tensors)[name]
        out = call()
        results.append(out if isinstance(out, tuple) else (out,))
    close = {"rtol": 3e-2, "atol": 6e-2} if case.dtype == "bfloat16" else {"rtol": 1e-3}
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(twin, ours, **({"atol": 1e-3} | close))


def test_refused_on_a_cpu():
    call = [sys.executable, "-m", "flashkernel.bench", "triton", "--framework", "torch"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2
    assert "triton: expected --device cuda and --framework torch, got --device cpu" in done.stderr

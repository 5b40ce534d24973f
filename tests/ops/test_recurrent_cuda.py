"""lstm and gru on CUDA by each of their implementations: a launch for each step, blocks that keep
the recurrent weights for all steps, clusters of such blocks. The tests of the ops take whichever a
call gets."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import flashkernel as fk
import software_gpu
from harness import BACKENDS, DTYPES, run_forward, run_gradients, seeded
from test_gru import gru_case
from test_lstm import lstm_case

pytestmark = pytest.mark.skipif("torch_cuda" not in BACKENDS, reason="needs a GPU")

SMALL = {"b": 3, "length": 5, "inputs": 9, "hidden": 21}
CASES = [
    (make, options)
    for make in (lstm_case, gru_case)
    for options in (
        SMALL,
        {"b": 9, "length": 3, "inputs": 8, "hidden": 72, "reverse": True},
        {"lengths": (4, 0, 1, 9), "inputs": 11, "hidden": 70},
        {"b": 1, "length": 6, "inputs": 16, "hidden": 136, "bias": False, "states": False},
    )
]
# Each of them takes two launches a step.
STEPS_ONLY = [
    (lstm_case, {"b": 3, "length": 4, "hidden": 24, "outputs": 16}),
    (gru_case, {"b": 3, "length": 4, "hidden": 24, "reset_after": False}),
]


def name_of(value) -> str:
    """A parameter in a test's name, which is the same in every process."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return value.__name__


@contextlib.contextmanager
def forced(op, implementation):
    for name in (f"{op}_fwd", f"{op}_bwd"):
        fk.force_implementation(name, implementation)
    try:
        yield
    finally:
        for name in (f"{op}_fwd", f"{op}_bwd"):
            fk.force_implementation(name, None)


def takes(case, implementation, dtype):
    """Whether the GPU at hand has what the implementation needs."""
    arch = int(os.environ.get("FK_SOFTGPU_ARCH", 0)) or 10 * torch.cuda.get_device_capability()[0]
    if implementation == "cuda_sm90":
        return arch >= 90
    return implementation == "cuda" or dtype != "bfloat16" or arch >= 80


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ("cuda", "cuda_persistent", "cuda_sm90"))
@pytest.mark.parametrize(("make", "options"), CASES, ids=name_of)
def test_implementation(make, options, implementation, dtype):
    case = make(**options)
    if not takes(case, implementation, dtype):
        pytest.skip("for another GPU")
    with forced(case.op, implementation):
        run_forward(case, "torch_cuda", dtype)
        run_gradients(case, "torch_cuda", dtype)


@pytest.mark.parametrize(("make", "options"), STEPS_ONLY, ids=name_of)
def test_what_takes_a_launch_for_each_step(make, options):
    case = make(**options)
    t = {k: v.float() for k, v in case.inputs(seeded("steps")).items()}
    if not software_gpu.ON:
        t = {k: v.cuda() for k, v in t.items()}
    reason = {"lstm": "no projection", "gru": "reset after the product with the state only"}
    message = f"does not take this CUDA call: its kernels .*{reason[case.op]}"
    with forced(case.op, "cuda_persistent"), pytest.raises(fk.Error, match=message):
        getattr(fk, case.op)(**t, **case.attributes)


# A process of its own, since a chip has the same number of multiprocessors as long as it lives.
FEW = """
import sys, flashkernel as fk, torch
op, gates = sys.argv[1], {"lstm": 4, "gru": 3}[sys.argv[1]]
x, w_ih = torch.randn(2, 3, 8), torch.randn(gates * 256, 8) / 3
w_hh = torch.randn(gates * 256, 256) / 16
w_ih.requires_grad_()
y, *_ = getattr(fk, op)(x, w_ih, w_hh)
y.sum().backward()
zeros = torch.zeros(1, 2, 256)
first = (zeros, zeros) if op == "lstm" else zeros
expected = getattr(torch, op)(x, first, [w_ih, w_hh], False, 1, 0.0, False, False, True)[0]
assert (y - expected).abs().max() < 1e-4
"""


def on_few_multiprocessors(op, multiprocessors, **settings):
    environment = {**os.environ, "FK_LOG": "dispatch", **settings}
    if os.environ["FK_SOFTGPU_ARCH"] == "90":
        environment["FK_SOFTGPU_ARCH"] = "80"  # a cluster would take the call
    if multiprocessors is not None:
        environment["FK_SOFTGPU_MULTIPROCESSORS"] = str(multiprocessors)
    return subprocess.run(
        [sys.executable, "-c", FEW, op],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


needs_few = pytest.mark.skipif(
    not software_gpu.ON, reason="asks for a chip with few multiprocessors"
)


@needs_few
@pytest.mark.parametrize("op", ("lstm", "gru"))
@pytest.mark.parametrize(("multiprocessors", "chosen"), ((4, "cuda"), (None, "cuda_persistent")))
def test_fewer_multiprocessors_than_blocks(op, multiprocessors, chosen):
    """Blocks that wait for each other are never more than fit on the chip."""
    done = on_few_multiprocessors(op, multiprocessors)
    assert done.returncode == 0, done.stderr
    assert f"{op}_fwd -> {chosen} (" in done.stderr
    assert f"{op}_bwd -> {chosen} (" in done.stderr


@needs_few
@pytest.mark.parametrize("direction", ("fwd", "bwd"))
@pytest.mark.parametrize("op", ("lstm", "gru"))
def test_too_few_multiprocessors_are_refused(op, direction):
    """Forced all the same, the call is refused before anything is launched, and says why."""
    done = on_few_multiprocessors(op, 4, FK_IMPL=f"{op}_{direction}=cuda_persistent")
    assert done.returncode == 1, done.stderr
    gates = {"lstm": 4, "gru": 3}[op]
    reason = (
        f"{op}: the forced implementation 'cuda_persistent' does not take this CUDA call: the "
        f"recurrent weights of 256 units with {gates} gates do not fit the registers of 4 blocks, "
        "the most that this GPU's multiprocessors run at once"
    )
    assert reason in done.stderr
    assert f"{op}_{direction} ->" not in done.stderr

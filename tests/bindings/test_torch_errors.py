"""What the torch binding refuses, and in which words."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import flashkernel as fk
from torch_samples import EVERY_OP, call, same_values, sampling, to_torch

pytestmark = pytest.mark.filterwarnings("error:.*autograd kernel was not registered")


@EVERY_OP
def test_wrong_dtypes_and_types_name_the_argument(op):
    sample = sampling.draw(op, 19, optionals=True)
    arguments = to_torch(sample)
    for f in op.inputs:
        if arguments[f.name] is None:  # excluded by another one
            continue
        pattern = f"^{op.public_name}: {f.name}: .*"
        for requires_grad in (False, True):
            base = dict(arguments)
            if op.backward:
                first = sampling.differentiable(op)[0]
                base[first] = base[first].clone().requires_grad_(requires_grad)
            for dtype in (torch.float64, torch.bool, torch.complex64):
                wrong = {**base, f.name: base[f.name].to(dtype)}
                with pytest.raises(fk.Error, match=pattern + str(dtype).removeprefix("torch.")):
                    call(op, wrong)
            if f is not op.inputs[0]:
                with pytest.raises(fk.Error, match=pattern + "torch tensor, got ndarray"):
                    call(op, {**base, f.name: sample[f.name]})
            with pytest.raises(fk.Error, match=pattern + "(dimension|shape)"):
                call(op, {**base, f.name: base[f.name][(None,) * 9]})
        with pytest.raises(fk.Error, match=pattern):
            call(op, {**arguments, f.name: arguments[f.name].to_sparse()})
    if len(op.inputs) > 1:
        with pytest.raises(
            fk.Error, match=f"{op.inputs[1].name}: expected a NumPy array, got Tensor"
        ):
            call(op, {**sample, op.inputs[1].name: arguments[op.inputs[1].name]})


@EVERY_OP
def test_wrong_attributes_name_the_argument(op):
    arguments = to_torch(sampling.draw(op, 20))
    for f in op.attributes:
        for wrong in ("no such thing", "", [1], 2**70 if f.kind in ("integer", "axis") else {}):
            with pytest.raises(fk.Error, match=f"{op.public_name}: {f.name}: expected .* got"):
                call(op, {**arguments, f.name: wrong})
    if op.axis:
        with pytest.raises(fk.Error, match=f"{op.public_name}: {op.axis.name}: expected -"):
            call(op, {**arguments, op.axis.name: 9})
        ordinary = call(op, {**arguments, op.axis.name: 0})
        same_values(call(op, {**arguments, op.axis.name: np.int64(0)}), ordinary)


def test_shapes_that_do_not_fit():
    with pytest.raises(fk.Error, match=r"rms_norm: weight: expected shape \(8,\)"):
        fk.rms_norm(torch.randn(3, 8), torch.randn(7))
    with pytest.raises(fk.Error, match=r"rms_norm: weight: expected shape \(8,\)"):
        fk.rms_norm(torch.randn(3, 8, requires_grad=True), torch.randn(7))


def test_errors_inside_a_compiled_graph_have_the_same_text():
    torch._dynamo.reset()
    f = torch.compile(lambda x, w: fk.rms_norm(x, w), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="rms_norm: weight: expected shape"):
        f(torch.randn(3, 8), torch.randn(7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_must_agree():
    with pytest.raises(fk.Error, match="rms_norm: weight: expected cuda:0, where x is, got cpu"):
        fk.rms_norm(torch.randn(3, 8, device="cuda"), torch.randn(8))


def test_meta_tensors_and_others_must_not_mix():
    """Torch takes such a call for one of meta tensors, which computes nothing."""
    with pytest.raises(fk.Error, match="rms_norm: weight: expected cpu, where x is, got meta"):
        fk.rms_norm(torch.randn(3, 8), torch.ones(8, device="meta"))
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(fk.Error, match="rms_norm: weight: expected cpu, where x is, got meta"):
        fk.rms_norm(x, torch.ones(8, device="meta"))


@EVERY_OP
def test_derivatives_in_forward_mode_are_refused(op):
    """Torch would take the tangents of the results to be 0."""
    arguments = to_torch(sampling.draw(op, 21, optionals=False))
    name = next(f.name for f in op.inputs if f.dtype_rule == "T")
    with torch.autograd.forward_ad.dual_level():
        x = arguments[name]
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(fk.Error, match=f"{name}: expected a tensor without a tangent"):
            call(op, {**arguments, name: dual})
        call(op, arguments)


def test_first_exception_of_a_process():
    """An error travels through torch's frames even if no C++ exception was thrown before it."""
    source = """
import torch
import flashkernel as fk
try:
    fk.rms_norm(torch.ones(2, 8), torch.ones(3))
except fk.Error as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "rms_norm: weight: expected shape (8,)" in run.stdout

"""What the torch binding refuses, and in which words."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import flashkernel as fk
from torch_samples import (
    DIFFERENTIABLE,
    EVERY_OP,
    call,
    outputs_of,
    same_values,
    sampling,
    to_torch,
    with_gradient,
)

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
        wrongs = ["no such thing", "", [1], 2**70 if f.kind in ("integer", "axis") else {}]
        # Numbers that torch's own operators would make integers and booleans of.
        wrongs += [] if f.kind in ("number", "choice") else [np.float32(1.5), 0.5, math.nan]
        for wrong in wrongs:
            with pytest.raises(fk.Error, match=f"{op.public_name}: {f.name}: expected .* got"):
                call(op, {**arguments, f.name: wrong})
    for name in op.extra_keywords:
        with pytest.raises(fk.Error, match=f"{op.public_name}: {name}: expected True or False"):
            call(op, arguments, **{name: "no"})
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


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_errors_inside_a_compiled_graph_have_the_same_text(dynamic, requires_grad):
    wrong = [
        lambda x: fk.softmax(x, 7),
        lambda x: fk.softmax(x, 0.5),
        lambda x: fk.rope(x, x, x),
        lambda x: fk.attention(x, x, x, causal="no"),
        lambda x: fk.attention(x, x, x, rotary=(x,)),
        lambda x: fk.causal_conv1d(x, x[0], activation="relu"),
        lambda x: fk.causal_conv1d(x[0], x[0], return_final_state=True),
    ]
    if not (dynamic and requires_grad):  # then torch itself meets the gradients first
        wrong.append(lambda x: fk.rms_norm(x, x[0, 0, :7]))
    for function in wrong:
        torch._dynamo.reset()
        x = torch.randn(3, 4, 8, requires_grad=requires_grad)
        with pytest.raises(fk.Error) as eager:
            function(x)
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        with pytest.raises(RuntimeError) as error:
            compiled(x)
        text = str(error.value).replace("\\'", "'")
        assert str(eager.value) in text


def test_what_is_written_over_has_no_repeated_elements():
    x, weight = torch.randn(2, 6), torch.randn(6, 4)
    state = torch.zeros(1, 3, 6).expand(2, 3, 6)
    with pytest.raises(fk.Error, match="causal_conv1d_update: state: expected an output without"):
        fk.causal_conv1d_update(x, state, weight)
    heads, table = torch.zeros(1, 2, 1, 4).expand(3, 2, 1, 4), torch.zeros(2, 2)
    with pytest.raises(fk.Error, match="rope: x: expected an output without repeated elements"):
        fk.rope(heads, table, table, inplace=True)
    overlapping = torch.zeros(20).as_strided((1, 3, 1, 4), (16, 1, 16, 1))
    table = torch.zeros(3, 2)
    with pytest.raises(fk.Error, match="without repeated elements, got stride 1 in dimension 1"):
        fk.rope(overlapping, table, table, inplace=True)


def test_what_a_backward_writes_over_is_no_leaf():
    logits, targets = torch.randn(3, 8, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    for leaf in (logits, logits[:], torch.nn.Parameter(logits.detach())):
        with pytest.raises(fk.Error, match="^cross_entropy: logits: expected a tensor that is no"):
            fk.cross_entropy(leaf, targets, inplace_backward=True)
    with torch.no_grad():
        fk.cross_entropy(logits, targets, inplace_backward=True)
    loss = fk.cross_entropy((logits[:1] * 1).expand(3, 8), targets, inplace_backward=True)
    with pytest.raises(fk.Error, match="^cross_entropy: logits: expected an output without repeat"):
        loss.backward()


def test_nested_tensors():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(fk.Error, match="softmax: x: expected a dense tensor, got a nested one"):
        fk.softmax(nested)


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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@EVERY_OP
def test_derivatives_in_forward_mode_are_refused(op, mode):
    """Torch would take the tangents of the results to be 0."""
    arguments = to_torch(sampling.draw(op, 21, optionals=False))
    name = next(f.name for f in op.inputs if f.dtype_rule == "T")
    x = arguments[name]
    refused = pytest.raises(fk.Error, match=f"{name}: expected a tensor without a tangent")
    with mode(), forward_ad.dual_level():
        leaves = (x, x.clone().requires_grad_()) if op.backward else (x,)
        for dual in (forward_ad.make_dual(leaf, torch.ones_like(x)) for leaf in leaves):
            for given in (dual, dual[...]):
                with refused:
                    call(op, {**arguments, name: given})
        call(op, arguments)

    def function(x):
        with mode():
            return call(op, {**arguments, name: x})

    def of_a_batch(x):
        return torch.func.vmap(function)(x.expand(2, *x.shape))

    with refused:
        torch.func.jvp(function, (x,), (x,))
    with refused:
        torch.func.jvp(of_a_batch, (x,), (x,))
    with refused:
        torch.func.vmap(lambda x: torch.func.jvp(function, (x,), (x,)))(x[None])


@DIFFERENTIABLE
def test_tangents_of_gradients_are_right_or_refused(op):
    sample = sampling.draw(op, 22)
    names = with_gradient(op, sample)
    arguments = to_torch(sample, requires_grad=names)
    leaves = [arguments[n] for n in names]
    results = [o for o in outputs_of(call(op, arguments)) if o.requires_grad]

    def gradients_of(*gradients):
        return torch.autograd.grad(results, leaves, gradients, retain_graph=True)

    ones = tuple(torch.ones_like(o) for o in results)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, one) for one in ones]
        if all(f.repeats for f in op.backward.outputs):
            for gradient in gradients_of(*duals):
                same_values(*forward_ad.unpack_dual(gradient))
            return
        for again in (False, True):
            with pytest.raises(fk.Error, match="expected a tensor without a tangent"):
                torch.autograd.grad(results, leaves, duals, retain_graph=True, create_graph=again)
    with pytest.raises(fk.Error, match="expected a tensor without a tangent"):
        torch.func.jvp(gradients_of, ones, ones)


def test_operators_and_compiled_calls_refuse_tangents():
    x = torch.randn(3, 8)
    compiled = torch.compile(lambda x: fk.softmax(x), backend="aot_eager")
    compiled(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for function in (compiled, lambda x: torch.ops.flashkernel.softmax_fwd(x, -1)):
            with pytest.raises(RuntimeError, match="softmax: x: expected a tensor without a tang"):
                function(dual)


def test_a_backward_called_by_itself_refuses_statistics_of_another_form():
    """lse of packed sequences for a batch was once read past its end."""
    q = torch.zeros(4, 64, 2, 16)
    fk.attention(q, q, q)  # registers the operators

    def backward(lse):
        return torch.ops.flashkernel.attention_bwd(
            q, None, q, q, q, q, lse, False, -1, -1, math.inf, 0.0, None, None, None, None, None,
            False, None, None, False, 7,
        )  # fmt: skip

    backward(torch.zeros(4, 2, 64))
    with pytest.raises(
        RuntimeError,
        match=r"attention_bwd: lse: expected shape \(4, 2, 64\) to fit dout, got \(2, 1\)",
    ):
        backward(torch.zeros(2, 1))


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

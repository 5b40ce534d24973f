"""The torch binding among torch's own machinery: its checks of operators, torch.compile, modes."""

import concurrent.futures
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashkernel as fk
from flashkernel.torch import _operators
from torch_samples import (
    DIFFERENTIABLE,
    EVERY_CASE,
    EVERY_OP,
    call,
    loss_of,
    outputs_of,
    same_values,
    sampling,
    tensor_function,
    to_torch,
    with_gradient,
)

pytestmark = pytest.mark.filterwarnings("error:.*autograd kernel was not registered")


# --- torch's machinery ----------------------------------------------------------------------------


def operator_calls(op):
    """(variant, arguments with attributes as the operators take them) for every set of outputs."""
    for attributes in sampling.conditions(op):
        for optionals in (False, True):
            sample = sampling.draw(op, 10, optionals=optionals, attributes=attributes)
            for f in op.attributes:
                if f.kind != "number" or sample[f.name] is not None:
                    sample[f.name] = op.normalise(f, sample[f.name])
            wanted = op.outputs_wanted(*sample.values())
            outputs = tuple(i for i, w in enumerate(wanted) if w)
            shown = tuple(i for i in outputs if _operators.is_visible(op.outputs[i], sample))
            variants = _operators.registered[op.public_name].variants
            yield next(v for v in variants if (v.outputs, v.visible) == (outputs, shown)), sample


@EVERY_OP
def test_opcheck(op):
    for variant, sample in operator_calls(op):
        arguments = to_torch(sample)
        chosen = [arguments[name] for name in variant.arguments]
        torch.library.opcheck(variant.forward, chosen)
        if variant.in_place:
            torch.library.opcheck(variant.in_place, chosen)
        if not op.backward:
            continue
        arguments = to_torch(sample, requires_grad=with_gradient(op, sample))
        extra = [False for s in op.extra_keywords if s == "inplace_backward"]
        torch.library.opcheck(variant.differentiable, [*arguments.values(), *extra])


@DIFFERENTIABLE
def test_opcheck_of_the_backward(op, monkeypatch):
    calls = []
    backward = getattr(torch.ops.flashkernel, f"{op.public_name}_bwd").default
    original = type(backward).__call__

    def record(self, *arguments):
        if self is backward:
            calls.append([a.detach() if isinstance(a, torch.Tensor) else a for a in arguments])
        return original(self, *arguments)

    monkeypatch.setattr(type(backward), "__call__", record)
    for optionals in (False, True):
        sample = sampling.draw(op, 11, optionals=optionals)
        names = with_gradient(op, sample)
        for chosen in (names, names[:1]):
            arguments = to_torch(sample, requires_grad=chosen)
            loss = loss_of(call(op, arguments))
            # With a graph of its own, for otherwise a gradient that can be a view is one.
            leaves = [arguments[n] for n in chosen]
            torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    monkeypatch.undo()
    assert calls
    for arguments in calls:
        torch.library.opcheck(backward, arguments)


@EVERY_CASE
def test_compile_whole_graph(op, optionals, attributes):
    torch._dynamo.reset()
    sample = sampling.draw(op, 12, optionals=optionals, attributes=attributes)
    function, names = tensor_function(op, sample)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        results = []
        for f in (compiled, function):
            arguments = to_torch(sample)
            outputs = outputs_of(f(*(arguments[n] for n in names)))
            updated = [arguments[f.updates] for f in op.state_outputs]
            results.append([*outputs, *updated])
        for ours, plain in zip(*results, strict=True):
            same_values(ours, plain)
    if not op.backward:
        return
    grads = []
    for f in (compiled, function):
        arguments = to_torch(sample, requires_grad=with_gradient(op, sample))
        loss_of(f(*(arguments[n] for n in names))).backward()
        grads.append([arguments[n].grad for n in with_gradient(op, sample)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@EVERY_OP
def test_compile_once_for_all_sizes(op):
    torch._dynamo.reset()
    samples = _samples_of_one_rank(op, 3)
    function, names = tensor_function(op, samples[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    # Without the first, sizes that happen to be the same are taken to be so always.
    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        _check_gradients(op, compiled, function, names, samples)


def _check_gradients(op, compiled, function, names, samples) -> None:
    for sample in samples:
        arguments = to_torch(sample, requires_grad=with_gradient(op, sample))
        expected = function(*(arguments[n].clone() for n in names))
        result = compiled(*(arguments[n].clone() for n in names))
        torch.testing.assert_close(result, expected)
        if not op.backward:
            continue
        targets = [arguments[n] for n in with_gradient(op, sample)]
        torch.testing.assert_close(
            torch.autograd.grad(loss_of(result), targets),
            torch.autograd.grad(loss_of(expected), targets),
        )


def _samples_of_one_rank(op, count: int) -> list[dict]:
    """Samples that differ in sizes alone, none of them 1, on which torch.compile specialises, but
    in tensors that choose their shape for themselves, as a number for a whole tensor does."""
    attributes = {f.name: -1 if f.kind == "axis" else f.python_default for f in op.attributes}
    by_ranks = {}
    for seed in range(1000):
        sample = sampling.draw(op, seed, optionals=False, attributes=attributes)
        tensors = [v for v in sample.values() if isinstance(v, np.ndarray)]
        sized = [sample[f.name] for f in op.inputs if f.form != f.name]
        if all(n > 1 for t in sized if t is not None for n in t.shape):
            same = by_ranks.setdefault(tuple(t.ndim for t in tensors), [])
            same.append(sample)
            if len(same) == count:
                return same
    raise AssertionError("no such samples")


def test_compile_with_inductor():
    torch._dynamo.reset()

    def block(x, residual, weight):
        y, total = fk.rms_norm(x * 2, weight, residual=residual)
        return fk.softmax(y + 1, axis=-1).sum() + total.square().mean()

    compiled = torch.compile(block, fullgraph=True)
    grads = []
    for f in (block, compiled):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(*s, generator=generator) for s in ((3, 5, 64), (3, 5, 64), (64,))]
        inputs = [t.requires_grad_() for t in inputs]
        loss = f(*inputs)
        grads.append([loss, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_compile_with_transforms():
    torch._dynamo.reset()
    x, w = torch.randn(5, 3, 8), torch.randn(8)

    def loss(x):
        return fk.rms_norm(x, w).square().sum()

    def loss_of_all(x):
        return torch.func.vmap(loss)(x).sum()

    for function in (torch.func.grad(loss), torch.func.grad(loss_of_all), torch.func.vmap(loss)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), function(x))


def test_first_call_inside_compile():
    """Neither flashkernel.torch nor its operators exist before the compiler meets the call."""
    script = """
import sys, flashkernel as fk, torch
dynamic = eval(sys.argv[1])  # with True, the compiler starts again on its way
f = torch.compile(
    lambda x: fk.rms_norm(x) * 2, fullgraph=True, dynamic=dynamic, backend="aot_eager"
)
x = torch.randn(3, 8)
for _ in range(2):
    torch.testing.assert_close(f(x), fk.rms_norm(x) * 2)
assert torch.Tensor in fk._CALLS["rms_norm"]
"""
    for dynamic in ("None", "True"):
        subprocess.run([sys.executable, "-c", script, dynamic], check=True)


def test_first_call_does_without_the_compiler():
    """Whose import takes seconds; where it comes later, it follows our functions."""
    script = """
import sys, flashkernel as fk, torch
x = torch.randn(3, 8, requires_grad=True)
expected = fk.rms_norm(x.detach())
fk.rms_norm(x).sum().backward()
assert "torch._dynamo" not in sys.modules
f = torch.compile(fk.rms_norm, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(f(x.detach()), expected)
torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], x.grad)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_backward_by_compiled_autograd():
    torch._dynamo.reset()
    x = torch.randn(2, 8, requires_grad=True)
    weights = torch.randn(2, 8)
    (expected,) = torch.autograd.grad(fk.softmax(x), x, weights)
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        fk.softmax(x).backward(weights)
    torch.testing.assert_close(x.grad, expected)


@EVERY_OP
def test_modes_without_gradient_take_the_operator_without_one(op):
    sample = sampling.draw(op, 13)
    arguments = to_torch(sample, requires_grad=with_gradient(op, sample))
    expected = outputs_of(call(op, to_torch(sample)))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            outputs = outputs_of(call(op, arguments))
        for ours, plain in zip(outputs, expected, strict=True):
            assert not ours.requires_grad and ours.grad_fn is None
            same_values(ours, plain)


@EVERY_OP
def test_meta_tensors_give_shapes(op):
    sample = sampling.draw(op, 15)
    arguments = to_torch(sample)
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    real, meta = outputs_of(call(op, arguments)), outputs_of(call(op, on_meta))
    for a, b in zip(real, meta, strict=True):
        assert b.device.type == "meta"
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_parameters_and_subclasses():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    weight = torch.nn.Parameter(torch.randn(8))
    expected = fk.rms_norm(x, weight.detach())
    assert fk.rms_norm(x, weight).requires_grad
    same_values(fk.rms_norm(x, weight).detach(), expected)
    same_values(fk.rms_norm(torch.nn.Parameter(x), weight).detach(), expected)
    tagged = fk.rms_norm(x.as_subclass(Tagged), weight.detach())
    assert type(tagged) is Tagged
    same_values(tagged.as_subclass(torch.Tensor), expected)


def test_views_that_torch_evaluates_late():
    complex_ = torch.randn(3, 8, dtype=torch.complex64)
    same_values(fk.softmax(complex_.conj().imag), fk.softmax(complex_.conj().imag.clone()))


def test_modes_see_calls():
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 8)
    with Record():
        fk.softmax(x)
        fk.rms_norm(x)
    assert seen == ["flashkernel::softmax_fwd", "flashkernel::rms_norm_fwd"]
    with torch.profiler.profile() as profile:
        fk.sum(x, -1)
    assert "flashkernel::sum_fwd" in {e.key for e in profile.key_averages()}
    traced = torch.jit.trace(lambda t: fk.softmax(t), x)
    y = torch.randn(3, 8)
    same_values(traced(y), fk.softmax(y))
    targets = torch.arange(3)
    traced = torch.jit.trace(lambda t: fk.cross_entropy(t, targets, reduction="none"), x)
    same_values(traced(y), fk.cross_entropy(y, targets, reduction="none"))
    same_values(torch.func.functionalize(lambda t: fk.softmax(t))(y), fk.softmax(y))
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        assert fk.softmax(torch.empty(3, 8)).shape == (3, 8)
    doubled = torch.fx.experimental.proxy_tensor.make_fx(lambda t: fk.softmax(t) * 2)(x)
    same_values(doubled(y), fk.softmax(y) * 2)


def test_threads_call_at_the_same_time():
    x = torch.randn(64, 512)
    expected = torch.softmax(x, -1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = range(1, 65)
        results = pool.map(lambda n: [fk.softmax(x[:n]) for _ in range(20)][-1], rows)
        for n, result in zip(rows, results, strict=True):
            torch.testing.assert_close(result, expected[:n])


def test_many_rows_on_many_threads():
    x = torch.randn(4099, 257)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(fk.softmax(x))
    finally:
        torch.set_num_threads(threads)
    same_values(results[0], results[1])
    same_values(results[0], results[2])


def test_empty_tensors():
    assert fk.rms_norm(torch.randn(0, 8)).shape == (0, 8)
    assert fk.layer_norm(torch.randn(3, 0)).shape == (3, 0)
    x = torch.randn(0, 4, requires_grad=True)
    fk.softmax(x).sum().backward()
    assert x.grad.shape == (0, 4)


def test_axis_none_is_everything():
    x = torch.randn(3, 4, 5, requires_grad=True)
    total = fk.sum(x)
    assert total.shape == ()
    total.backward()
    same_values(x.grad, torch.ones(3, 4, 5))

"""The torch binding, for every op by its declaration: values, gradients, torch's own checks of
operators, torch.compile, errors."""

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flashkernel as fk
from flashkernel.torch import _operators, _plain

sys.path.insert(0, str(Path(__file__).parents[1]))
import sampling

pytestmark = pytest.mark.filterwarnings("error:.*autograd kernel was not registered")

OPS = [pytest.param(op, id=op.public_name) for op in sampling.OPS]
CASES = [
    pytest.param(
        op,
        optionals,
        attributes,
        id="-".join([op.public_name, name, *map(str, attributes.values())]),
    )
    for op in sampling.OPS
    for optionals, name in ((False, "required"), (True, "all"))
    if not optionals or any(f.optional for f in op.inputs)
    for attributes in sampling.conditions(op)
]
EVERY_OP = pytest.mark.parametrize("op", OPS)
DIFFERENTIABLE = pytest.mark.parametrize("op", [p for p in OPS if p.values[0].backward])
EVERY_CASE = pytest.mark.parametrize(("op", "optionals", "attributes"), CASES)
DIFFERENTIABLE_CASE = pytest.mark.parametrize(
    ("op", "optionals", "attributes"), [p for p in CASES if p.values[0].backward]
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch(sample: dict, dtype=torch.float32, requires_grad=(), float32=()) -> dict:
    """`float32` names the inputs that are never in another dtype."""
    result = {}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy())
            if value.is_floating_point() and name not in float32:
                value = value.to(dtype)
            value.requires_grad_(name in requires_grad)
        result[name] = value
    return result


def call(op, arguments: dict, **keywords):
    return sampling.call(op, arguments, **keywords)


def outputs_of(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def loss_of(result, seed=0):
    """A scalar that weighs every output differently at every place."""
    generator = torch.Generator().manual_seed(seed)
    return sum(
        (o.float() * torch.randn(o.shape, generator=generator).to(o.device)).sum()
        for o in outputs_of(result)
    )


def with_gradient(op, sample):
    return [n for n in sampling.differentiable(op) if sample[n] is not None]


def same_values(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def strided(t):
    """The same values with gaps between them, or in another order of dimensions."""
    if t is None or not isinstance(t, torch.Tensor) or t.ndim == 0:
        return t
    wide = torch.full((*t.shape, 2), 7, dtype=t.dtype)
    wide[..., 0] = t
    return (
        wide[..., 0].transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 2 else wide[..., 0]
    )


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_CASE
def test_values_are_those_of_the_numpy_call(op, optionals, attributes, dtype):
    for seed in range(4):
        sample = sampling.draw(op, seed, optionals=optionals, attributes=attributes)
        float32 = [f.name for f in op.inputs if f.dtype_rule == "F"]
        arguments = to_torch(sample, DTYPES[dtype], float32=float32)
        plain = outputs_of(call(op, arguments))
        in_numpy = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                in_numpy[name] = _to_numpy(value)
        expected = outputs_of(call(op, in_numpy))
        assert len(plain) == len(expected)
        for ours, theirs in zip(plain, expected, strict=True):
            same_values(ours, _from_numpy(theirs))
            assert ours.is_contiguous()
        moved = {k: strided(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for ours, again in zip(plain, outputs_of(call(op, moved)), strict=True):
            torch.testing.assert_close(ours, again)


def _to_numpy(t):
    if t.dtype != torch.bfloat16:
        return t.numpy()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _from_numpy(a):
    a = np.asarray(a)
    if a.dtype.name == "bfloat16":
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(a.copy())


@DIFFERENTIABLE_CASE
def test_gradients_follow_finite_differences(op, optionals, attributes):
    for seed in range(3):
        sample = sampling.draw(op, seed, optionals=optionals, attributes=attributes)
        names = with_gradient(op, sample)
        arguments = to_torch(sample, requires_grad=names)
        result = call(op, arguments)
        loss_of(result).backward()
        with torch.no_grad():
            for ours, plain in zip(
                outputs_of(result), outputs_of(call(op, to_torch(sample))), strict=True
            ):
                same_values(ours, plain)
        random = np.random.default_rng(seed)
        for name in names:
            assert arguments[name].grad.dtype == arguments[name].dtype
            direction = random.standard_normal(sample[name].shape).astype(np.float32)
            step = 4e-3

            def at(distance, sample=sample, name=name, direction=direction):
                moved = {**sample, name: sample[name] + np.float32(distance) * direction}
                return loss_of(call(op, to_torch(moved))).item()

            expected = (at(step) - at(-step)) / (2 * step)
            got = float((arguments[name].grad * torch.from_numpy(direction)).sum())
            scale = float((arguments[name].grad.abs() * torch.from_numpy(abs(direction))).sum())
            assert got == pytest.approx(expected, abs=0.02 * scale + 0.02), name


@DIFFERENTIABLE_CASE
def test_strided_and_repeated_gradients(op, optionals, attributes):
    sample = sampling.draw(op, 5, optionals=optionals, attributes=attributes)
    names = with_gradient(op, sample)
    grads = []
    for repeat in (True, False):
        arguments = to_torch(sample, requires_grad=names)
        moved = {k: strided(v) for k, v in arguments.items()}
        outputs = outputs_of(call(op, moved if repeat else arguments))
        # The gradient of a sum is one number, repeated by stride 0.
        seeds = [torch.full((), 0.5, dtype=o.dtype).expand(o.shape) for o in outputs]
        seeds = seeds if repeat else [s.contiguous() for s in seeds]
        torch.autograd.backward(outputs, seeds)
        grads.append([arguments[n].grad for n in names])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@DIFFERENTIABLE_CASE
def test_only_the_gradients_asked_for(op, optionals, attributes):
    sample = sampling.draw(op, 6, optionals=optionals, attributes=attributes)
    names = with_gradient(op, sample)
    arguments = to_torch(sample, requires_grad=names)
    loss_of(call(op, arguments)).backward()
    for name in names:
        alone = to_torch(sample, requires_grad=[name])
        loss_of(call(op, alone)).backward()
        torch.testing.assert_close(alone[name].grad, arguments[name].grad)
        assert all(alone[n].grad is None for n in names if n != name)


@DIFFERENTIABLE_CASE
def test_an_output_nobody_uses_has_no_gradient(op, optionals, attributes):
    sample = sampling.draw(op, 7, optionals=optionals, attributes=attributes)
    names = with_gradient(op, sample)
    count = len(outputs_of(call(op, to_torch(sample))))
    for used in range(count):
        grads = []
        for explicit in (False, True):
            arguments = to_torch(sample, requires_grad=names)
            outputs = outputs_of(call(op, arguments))
            loss = loss_of(outputs[used])
            if explicit:
                loss = loss + sum((0 * o).sum() for o in outputs)
            grads.append(torch.autograd.grad(loss, [arguments[n] for n in names]))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@DIFFERENTIABLE
def test_gradients_by_torch_func(op):
    arguments = to_torch(sampling.draw(op, 6))
    names = with_gradient(op, arguments)

    def loss(values):
        return loss_of(call(op, {**arguments, **values}))

    values = {n: arguments[n] for n in names}
    ours = torch.func.grad(loss)(values)
    leaves = {n: t.clone().requires_grad_() for n, t in values.items()}
    for name, expected in zip(
        names, torch.autograd.grad(loss(leaves), leaves.values()), strict=True
    ):
        torch.testing.assert_close(ours[name], expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample():
    x, w = torch.randn(5, 3, 8), torch.randn(8)

    def loss(w, x):
        return fk.rms_norm(x, w).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    expected = torch.stack([torch.func.grad(loss)(w, one) for one in x])
    torch.testing.assert_close(each, expected)


@DIFFERENTIABLE
def test_gradient_of_a_gradient_is_refused(op):
    sample = sampling.draw(op, 8, optionals=False)
    names = with_gradient(op, sample)
    arguments = to_torch(sample, requires_grad=names)
    loss = sum((o.float() ** 2).sum() for o in outputs_of(call(op, arguments)))
    (grad, *_) = torch.autograd.grad(loss, [arguments[n] for n in names], create_graph=True)
    with pytest.raises(fk.Error, match=f"{op.public_name}: .*gradient of its gradient"):
        grad.sum().backward()


def test_inputs_without_gradient_say_so():
    for op in sampling.OPS:
        sample = sampling.draw(op, 9, optionals=True)
        for f in op.inputs:
            if f.name in sampling.differentiable(op) or f.dtype_rule in "IJ":
                continue
            if sample[f.name] is None:  # only calls with 8-bit inputs have it
                continue
            with pytest.raises(fk.Error, match=f"{op.public_name}: {f.name}: .*no gradient"):
                call(op, to_torch(sample, requires_grad=[f.name]))


# --- torch's machinery --------------------------------------------------------------------------


def operator_calls(op):
    """(variant, arguments with attributes as the operators take them) for every set of outputs."""
    for attributes in sampling.conditions(op):
        for optionals in (False, True):
            sample = sampling.draw(op, 10, optionals=optionals, attributes=attributes)
            sample.update({f.name: op.normalise(f, sample[f.name]) for f in op.attributes})
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


def tensor_function(op, sample):
    """f(*tensors) for the tensors of a sample, and their names."""
    names = [f.name for f in op.inputs if sample[f.name] is not None]
    rest = {k: v for k, v in sample.items() if k not in names}
    public = getattr(fk, op.public_name)
    # Settled outside of what torch.compile traces.
    positional, keywords = sampling.split(op, {f.name: f.name for f in op.arguments})
    grouped = {k: v for k, v in keywords.items() if isinstance(v, tuple)}
    single = [k for k in keywords if k not in grouped]
    absent = {k for k, v in grouped.items() if all(sample[n] is None for n in v)}

    def function(*tensors):
        values = {**rest, **dict(zip(names, tensors, strict=True))}
        given = {n: values[n] for n in single}
        for name, members in grouped.items():
            given[name] = None if name in absent else tuple(values[n] for n in members)
        return public(*[values[n] for n in positional], **given)

    return function, names


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
            updated = [arguments[op.state_output.updates]] if op.state_output else []
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
    """Samples that differ in sizes alone, none of them 1, on which torch.compile specialises."""
    attributes = {f.name: -1 if f.kind == "axis" else f.python_default for f in op.attributes}
    by_ranks = {}
    for seed in range(1000):
        sample = sampling.draw(op, seed, optionals=False, attributes=attributes)
        tensors = [v for v in sample.values() if isinstance(v, np.ndarray)]
        if all(n > 1 for t in tensors for n in t.shape):
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


def test_first_call_inside_compile():
    """Neither flashkernel.torch nor its operators exist before the compiler meets the call."""
    script = """
import flashkernel as fk, torch
f = torch.compile(lambda x: fk.rms_norm(x) * 2, fullgraph=True, backend="aot_eager")
x = torch.randn(3, 8)
torch.testing.assert_close(f(x), fk.rms_norm(x) * 2)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@EVERY_OP
def test_modes_without_gradient_take_the_plain_operator(op):
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
def test_autocast_changes_nothing(op):
    sample = sampling.draw(op, 14)
    plain = outputs_of(call(op, to_torch(sample)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(outputs_of(call(op, to_torch(sample))), plain, strict=True):
            same_values(a, b)


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


# --- calls past the dispatcher ------------------------------------------------------------------

PLAIN = pytest.mark.skipif(not _plain.available, reason="this torch is laid out in another way")


@PLAIN
def test_plain_calls_are_made_without_the_dispatcher():
    x = torch.randn(3, 8)
    outside = _operators.registered["softmax"].variants[0].forward
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            given = (x, torch.nn.Parameter(x, requires_grad=False), torch.randn(3, 8))
            handed_on = []
            made = _plain.without_gradient(outside, lambda *a, to=handed_on: to.append(a))
            results = [made(t, -1) for t in given]
            assert not handed_on
            same_values(results[0], outside(x, -1))
            assert results[0].is_inference() == torch.is_inference_mode_enabled()


@PLAIN
def test_other_calls_are_handed_on():
    x = torch.randn(3, 8)
    outside = _operators.registered["softmax"].variants[0].forward
    made = _plain.without_gradient(outside, lambda *a: "handed on")
    complex_ = torch.randn(3, 8, dtype=torch.complex64)
    for given in (
        (x,),
        (x, -1, 0),
        (x, 1.0),
        (x, True),
        (x, 1 << 70),
        (x, 5),
        (None, -1),
        (x.numpy(), -1),
        (x.to("meta"), -1),
        (x.double(), -1),
        (x.to_sparse(), -1),
        (torch._neg_view(x), -1),
        (complex_.conj().imag, -1),
        (x.clone().requires_grad_(), -1),
        (x.as_subclass(type("Tagged", (torch.Tensor,), {})), -1),
    ):
        assert made(*given) == "handed on"
    with torch.autograd.profiler.profile():
        assert made(x, -1) == "handed on"
    with torch.overrides.BaseTorchFunctionMode():
        assert made(x, -1) == "handed on"
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert made(x, -1) == "handed on"
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


# --- in place -----------------------------------------------------------------------------------


def _in_place_ops():
    return [pytest.param(op, id=op.public_name) for op in sampling.OPS if op.in_place_output]


@pytest.mark.parametrize("op", _in_place_ops())
def test_in_place(op):
    written = op.in_place_output.may_alias
    sample = sampling.draw(op, 16)
    expected = call(op, to_torch(sample))
    arguments = {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in to_torch(sample).items()
    }
    version = arguments[written]._version
    result = call(op, arguments, inplace=True)
    assert outputs_of(result)[0] is arguments[written]
    assert arguments[written]._version > version
    same_values(arguments[written], outputs_of(expected)[0])


@pytest.mark.parametrize("op", _in_place_ops())
def test_in_place_with_gradient(op):
    written = op.in_place_output.may_alias
    sample = sampling.draw(op, 17)
    grads = []
    for inplace in (False, True):
        arguments = to_torch(sample, requires_grad=[written])
        leaf = arguments[written]
        arguments[written] = leaf * 1
        loss_of(call(op, arguments, inplace=inplace)).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("op", _in_place_ops())
def test_in_place_under_compile(op):
    torch._dynamo.reset()
    written = op.in_place_output.may_alias
    sample = sampling.draw(op, 18)
    public = getattr(fk, op.public_name)
    arguments = to_torch(sample)
    positional, keywords = sampling.split(op, arguments)
    place = [f.name for f in op.arguments if not f.keyword_only].index(written)

    def write(x):
        x = x + 1
        public(*positional[:place], x, *positional[place + 1 :], **keywords, inplace=True)
        return x * 2

    x = arguments[written]
    torch.testing.assert_close(
        torch.compile(write, fullgraph=True, backend="aot_eager")(x), write(x)
    )


def test_backward_in_place():
    logits = torch.randn(5, 11)
    targets = torch.tensor([0, 10, -100, 3, 4])
    grads = []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        middle = leaf * 1
        loss = fk.cross_entropy(middle, targets, inplace_backward=inplace)
        (grad,) = torch.autograd.grad(loss, [middle], retain_graph=True)
        grads.append(grad)
        assert (grad.data_ptr() == middle.data_ptr()) is inplace
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, [middle])
    same_values(*grads)


# --- errors -------------------------------------------------------------------------------------


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

"""The torch binding, for every op by its declaration: values, gradients, in place."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from torch_samples import (
    DIFFERENTIABLE,
    DIFFERENTIABLE_CASE,
    DTYPES,
    EVERY_CASE,
    call,
    loss_of,
    outputs_of,
    same_values,
    sampling,
    strided,
    to_torch,
    with_gradient,
)

pytestmark = pytest.mark.filterwarnings("error:.*autograd kernel was not registered")


# --- values and gradients -------------------------------------------------------------------------


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


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@DIFFERENTIABLE_CASE
def test_outputs_whose_users_give_no_gradient(op, optionals, attributes):
    sample = sampling.draw(op, 8, optionals=optionals, attributes=attributes)
    arguments = to_torch(sample, requires_grad=with_gradient(op, sample))
    loss_of(tuple(map(WithoutGradient.apply, outputs_of(call(op, arguments))))).backward()
    assert all(v.grad is None for v in arguments.values() if isinstance(v, torch.Tensor))


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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@DIFFERENTIABLE
def test_gradients_through_a_batch(op):
    """What vmap wraps does not say that it requires a gradient."""
    sample = sampling.draw(op, 7, optionals=False)
    arguments = to_torch(sample)
    names = with_gradient(op, sample)

    def loss(*values):
        results = outputs_of(call(op, {**arguments, **dict(zip(names, values, strict=True))}))
        return sum(o.float().square().sum() for o in results)

    def loss_of_all(*values):
        return torch.func.vmap(loss)(*values).sum()

    places = tuple(range(len(names)))
    values = [torch.stack([arguments[n], arguments[n] / 2]) for n in names]
    leaves = [v.clone().requires_grad_() for v in values]
    each = [torch.func.grad(loss, places)(*(v[i] for v in values)) for i in range(2)]
    expected = tuple(torch.stack(gradients) for gradients in zip(*each, strict=True))
    for gradients in (
        torch.func.grad(loss_of_all, places)(*values),
        torch.autograd.grad(loss_of_all(*leaves), leaves),
    ):
        torch.testing.assert_close(gradients, expected, equal_nan=True)


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


# --- in place -------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", _in_place_ops())
def test_in_place_by_torch_func(op):
    written = op.in_place_output.may_alias
    arguments = to_torch(sampling.draw(op, 17))
    x = arguments[written]
    batch = torch.stack([x, x / 2])
    grads = []
    for inplace in (False, True):

        def loss(x, inplace=inplace):
            middle = x * 1
            result = outputs_of(call(op, {**arguments, written: middle}, inplace=inplace))[0]
            return ((middle if inplace else result) ** 3).sum()

        def loss_of_all(batch, loss=loss):
            return torch.func.vmap(loss)(batch).sum()

        grads.append((torch.func.grad(loss)(x), torch.func.grad(loss_of_all)(batch)))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(grads[1][1][0], grads[1][0])


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

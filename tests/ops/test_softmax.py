"""softmax, log_softmax and logsumexp."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    EPSILON,
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    check_finite_differences,
    convert,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
)

FORMULAS = {
    "softmax": lambda axis: lambda x: torch.softmax(x, axis),
    "log_softmax": lambda axis: lambda x: torch.log_softmax(x, axis),
    "logsumexp": lambda axis: lambda x: torch.logsumexp(x, axis),
}


def softmax_case(op, shape, axis=-1, scale=3.0):
    return Case(
        f"{op}[{'x'.join(map(str, shape))},axis={axis},scale={scale}]",
        op,
        lambda g: {"x": normal(g, *shape, scale=scale)},
        FORMULAS[op](axis),
        {"axis": axis},
        (),
        ("x",),
        # The terms of a gradient are as large as the cotangents, whatever is left of them.
        gradient_floor=4 * EPSILON["float32"] if op == "softmax" else 0.0,
    )


SHAPES = [
    ((5, 64), -1),
    ((3, 7, 33), 1),
    ((2, 3, 2, 129), 0),
    ((6, 5), 0),
    ((70, 130), 0),
    ((1, 1), -1),
    ((17, 1), 1),
    ((4, 768), -1),
    ((1, 40001), -1),
    ((300, 40), -1),
    ((2, 9000), 1),
    ((33,), 0),
    ((0, 16), -1),
    ((3, 0, 2), -1),
]
CASES = [softmax_case(op, *s) for op in FORMULAS for s in SHAPES]
CASES += [softmax_case(op, (4, 100), scale=100.0) for op in FORMULAS]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", (0, 1, 2))
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("op", FORMULAS)
def test_strides(op, backend, axis, layout, dtype):
    case = softmax_case(op, (5, 12, 40), axis)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "0x" not in str(c)], ids=str)
def test_finite_differences(case, backend):
    if "scale=100" in str(case):
        pytest.skip("a step of the difference is larger than the softmax is smooth")
    check_finite_differences(case, backend)


@hypothesis.given(
    op=st.sampled_from(list(FORMULAS)),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=80)
def test_any_shape(op, shape, data, dtype, backend):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    hypothesis.assume(shape[axis] > 0 or op != "logsumexp")  # torch refuses an empty axis
    run_forward(softmax_case(op, tuple(shape), axis), backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_are_torch_s(backend):
    x = torch.tensor([[0.0, -np.inf, 1.0], [-np.inf] * 3, [np.inf, 0.0, 1.0], [np.nan, 0.0, 0.0]])
    for op in ("softmax", "log_softmax"):
        ours = torch.from_numpy(np.asarray(_numpy(getattr(fk, op)(convert(x, backend)))))
        assert torch.allclose(ours, getattr(torch, op)(x, -1), equal_nan=True), op
    lse = np.asarray(_numpy(fk.logsumexp(convert(x, backend))))
    assert lse[1] == -np.inf and lse[2] == np.inf and np.isnan(lse[3])


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradient_of_logsumexp_where_all_is_minus_infinity(backend):
    x = convert(torch.full((2, 4), -np.inf), backend).requires_grad_()
    (gradient,) = torch.autograd.grad(fk.logsumexp(x).sum(), x)
    assert (gradient == 0).all()


def test_logsumexp_of_nothing_is_minus_infinity():
    assert (fk.logsumexp(np.ones((3, 0), np.float32)) == -np.inf).all()


def test_logsumexp_is_float32():
    assert fk.logsumexp(np.ones((3, 4), np.float16)).dtype == np.float32


def _numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("op", FORMULAS)
@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(op, make):
    f = getattr(fk, op)
    x = make(np.ones((2, 8), np.float32))
    with raises(rf"{op}: axis: expected -2 to 1 for x of shape \(2, 8\), got 2"):
        f(x, axis=2)
    with raises(rf"{op}: axis: expected an integer, got 'last'"):
        f(x, axis="last")
    with raises(rf"{op}: x: expected at least 1 dimension, got a scalar"):
        f(make(np.ones((), np.float32)))
    with raises(rf"{op}: x: expected float32, float16 or bfloat16, got int32"):
        f(make(np.ones((2, 8), np.int32)))

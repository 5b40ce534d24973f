"""sum and max."""

import math

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
    to_float64,
)

FORMULAS = {
    "sum": lambda axis: lambda x: x.sum() if axis is None else x.sum(axis),
    "max": lambda axis: lambda x: x.amax() if axis is None else x.amax(axis),
}


def reduce_case(op, shape, axis=-1):
    count = math.prod(shape) if axis is None else shape[axis]
    return Case(
        f"{op}[{'x'.join(map(str, shape))},axis={axis}]",
        op,
        lambda g: {"x": normal(g, *shape)},
        FORMULAS[op](axis),
        {"axis": axis},
        (),
        ("x",),
        # Partial sums are larger than a sum that happens to cancel: about as the root of the count.
        # Of one sum alone, torch's error may vanish by luck: this is four times what is usual.
        floor=8 * EPSILON["float32"] * count**0.5 if op == "sum" else 0.0,
    )


SHAPES = [
    ((5, 64), -1),
    ((3, 7, 33), 1),
    ((2, 3, 2, 129), 0),
    ((3, 7, 33), None),
    ((1, 200003), None),
    ((1, 200003), 1),
    ((70, 130), 0),
    ((5000, 3), 0),
    ((1, 1), -1),
    ((4, 768), -1),
    ((33,), None),
    ((0, 16), -1),
]
CASES = [reduce_case(op, *s) for op in FORMULAS for s in SHAPES]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", (0, 1, 2, None))
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("op", FORMULAS)
def test_strides(op, backend, axis, layout, dtype):
    case = reduce_case(op, (5, 12, 40), axis)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("shape, axis", [(s, a) for s, a in SHAPES if s[0] and len(s) < 3])
def test_finite_differences(shape, axis, backend):
    check_finite_differences(reduce_case("sum", shape, axis), backend)


@hypothesis.given(
    op=st.sampled_from(list(FORMULAS)),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=80)
def test_any_shape(op, shape, data, dtype, backend):
    axes = st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1))
    run_forward(reduce_case(op, tuple(shape), data.draw(axes)), backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_ties_share_the_gradient(backend):
    x = convert(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), backend).requires_grad_()
    (gradient,) = torch.autograd.grad(fk.max(x, -1).sum(), x)
    expected = torch.tensor([[0, 0.5, 0.5], [1 / 3] * 3])
    assert torch.allclose(gradient.cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", (0, 5, 999, 40000))
def test_nan_wins(backend, position):
    x = torch.zeros(1, 40001)
    x[0, position] = np.nan
    for axis in (None, -1):
        assert to_float64(fk.max(convert(x, backend), axis)).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_of_minus_infinities(backend):
    x = torch.full((3, 50), -np.inf)
    assert float(fk.max(convert(x, backend))) == -np.inf


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_max_of_no_rows(device):
    assert fk.max(torch.empty(0, 0, device=device), axis=-1).shape == (0,)


def test_sum_of_nothing_is_zero():
    assert (fk.sum(np.ones((3, 0), np.float32), -1) == 0).all()
    assert fk.sum(np.ones((3, 0), np.float32)) == 0


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_everything_in_a_matrix():
    x = np.matrix(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (fk.sum(x).shape, fk.sum(x), fk.max(x)) == ((), 15, 5)
    assert (fk.sum(x.T), fk.max(x[::-1, ::2])) == (15, 5)


def test_what_is_too_large_to_be_flattened():
    with pytest.raises(MemoryError):
        fk.sum(np.broadcast_to(np.ones(2, np.float32), (1 << 45, 2)))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fk.sum(torch.ones(2).expand(1 << 45, 2))


def test_what_is_no_array_is_named():
    with raises("sum: x: expected a NumPy array, got Generator"):
        fk.sum(np.random.default_rng())


def test_sums_of_many_float32_are_accurate():
    x = np.full((1 << 24) + 5, 0.1, np.float32)
    assert abs(float(fk.sum(x)) / (x.size * float(np.float32(0.1))) - 1) < 1e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("columns", (3, 17, 768, 1025, 5000))
def test_where_a_row_lies_does_not_show(columns, dtype):
    """Kernels load whole cache lines where they can: from any place, the same bits."""
    values = torch.randn(5, columns).to(dtype)
    values[1, columns // 2] = torch.nan
    for offset in range(20):
        x = torch.empty(values.numel() + offset, dtype=dtype)[offset:].view_as(values)
        x.copy_(values)
        torch.testing.assert_close(fk.max(x, -1), values.amax(-1), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            fk.sum(x, -1), fk.sum(values, -1), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    x = make(np.ones((2, 8), np.float32))
    with raises(r"sum: axis: expected -2 to 1 for x of shape \(2, 8\), got -3"):
        fk.sum(x, axis=-3)
    with raises(r"max: axis: expected an integer or None, got \(0, 1\)"):
        fk.max(x, axis=(0, 1))
    with raises("max: x: expected at least 1 entry along the reduced axis, got 0"):
        fk.max(make(np.ones((2, 0), np.float32)), axis=-1)

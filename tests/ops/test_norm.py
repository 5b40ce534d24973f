"""rms_norm and layer_norm."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
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
    seeded,
)


def rms_formula(eps=1e-6, weight_offset=0.0):
    def formula(x, weight=None, residual=None):
        s = x if residual is None else x + residual
        w = None if weight is None else weight + weight_offset
        y = F.rms_norm(s, s.shape[-1:], w, eps)
        return y if residual is None else (y, s)

    return formula


def layer_formula(eps=1e-5):
    def formula(x, weight=None, bias=None, residual=None):
        s = x if residual is None else x + residual
        y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
        return y if residual is None else (y, s)

    return formula


def norm_case(
    op, shape, weight=True, bias=True, residual=False, scale=1.0, shift=0.0, **attributes
):
    names = ["x"] + (["residual"] if residual else [])
    vectors = (["weight"] if weight else []) + (["bias"] if bias and op == "layer_norm" else [])

    def inputs(g):
        out = {n: normal(g, *shape, scale=scale) + shift for n in names}
        return out | {n: normal(g, shape[-1]) for n in vectors}

    formula = rms_formula if op == "rms_norm" else layer_formula
    label = "x".join(map(str, shape)) + "".join(f"+{n}" for n in [*vectors, *names[1:]])
    extra = "".join(f",{k}={v}" for k, v in attributes.items())
    return Case(
        f"{op}[{label}{extra}{f',shift={shift}' if shift else ''}]",
        op,
        inputs,
        formula(**attributes),
        attributes,
        tuple(vectors),
        (*names, *vectors),
        # One column is its own mean: the gradient is a difference of equal numbers times up to
        # 1 / sqrt(eps).
        gradient_floor=1e-4 if shape[-1] == 1 else 0.0,
    )


OPS = ("rms_norm", "layer_norm")
CASES = [
    norm_case(op, *arguments, **keywords)
    for op in OPS
    for arguments, keywords in [
        (((5, 64),), {}),
        (((3, 7, 33),), {"residual": True}),
        (((2, 3, 2, 129),), {"weight": False, "bias": False}),
        (((1, 1),), {}),
        (((17, 1),), {"residual": True}),
        (((4, 768),), {"residual": True, "eps": 1e-3}),
        (((1, 5000),), {"residual": True}),
        (((3, 20001),), {"residual": True}),
        (((300, 40),), {}),
        (((6, 96),), {"shift": 30.0}),
        (((0, 16),), {"residual": True}),
        (((2, 0, 16),), {}),
        (((64,),), {}),
    ]
] + [
    norm_case("rms_norm", (5, 48), residual=True, weight_offset=1.0),
    norm_case("layer_norm", (5, 48), weight=False),
    norm_case("layer_norm", (5, 48), bias=False),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("op", OPS)
def test_strides(op, backend, layout, dtype):
    case = norm_case(op, (4, 6, 72), residual=True)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_parameters_in_the_activations_dtype(op, backend, dtype):
    case = norm_case(op, (5, 72))
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "0x" not in str(c)], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@hypothesis.given(
    op=st.sampled_from(OPS),
    shape=st.lists(st.integers(0, 5), max_size=3).flatmap(
        lambda lead: st.integers(1, 300).map(lambda n: (*lead, n))
    ),
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    weight=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(op, shape, dtype, residual, weight, backend):
    case = norm_case(op, shape, weight=weight, bias=weight, residual=residual)
    run_forward(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_backward_is_deterministic(op, backend):
    x = convert(torch.randn(513, 771), backend).requires_grad_()
    w = convert(torch.randn(771), backend).requires_grad_()
    y = getattr(fk, op)(x, w)
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, w), g, retain_graph=True)
    for _ in range(3):
        again = torch.autograd.grad(y, (x, w), g, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_the_gradient_of_one_column_is_zero(backend, dtype):
    """A single column is its own mean, whatever it is scaled by: nothing is left but the gradient
    that comes to the sum."""
    g = seeded("one column", dtype)
    x, residual, dy, dsum = (normal(g, 301, 1).to(getattr(torch, dtype)) for _ in range(4))
    weight = normal(g, 1).float()
    x, residual, dy, dsum, weight = (convert(t, backend) for t in (x, residual, dy, dsum, weight))
    x.requires_grad_(True)
    (dx,) = torch.autograd.grad(fk.layer_norm(x, weight), x, dy)
    assert dx.count_nonzero() == 0
    y, total = fk.layer_norm(x, weight, residual=residual)
    (dx,) = torch.autograd.grad((y, total), x, (dy, dsum))
    assert torch.equal(dx, dsum)


@pytest.mark.parametrize("op", OPS)
def test_a_nan_stays_in_its_row(op):
    x = np.ones((3, 40), np.float32)
    x[1, 7] = np.nan
    y = getattr(fk, op)(x)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def _relative_error(ours, exact) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("op", OPS)
def test_long_rows_keep_their_digits(op):
    """Sums of so many columns in float32 alone would lose three digits here, and more of a constant
    row, whose deviations are 0."""
    torch_norm = getattr(F, op)
    columns = 1 << 18
    x = torch.rand(2, columns, generator=seeded(op)) + (1.0 if op == "layer_norm" else 0.0)
    dy = torch.randn(x.shape, generator=seeded(op, "dy"))

    def both(norm, x, dy):
        x = x.clone().requires_grad_()
        y = norm(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    def plain(x):
        return torch_norm(x, (columns,), eps=1e-6)

    exact = both(plain, x.double(), dy.double())
    same = both(plain, x, dy)
    ours = both(lambda x: getattr(fk, op)(x, eps=1e-6), x, dy)
    for i, factor in enumerate((2, 3)):
        bar = factor * max(_relative_error(same[i], exact[i]), 6e-8)
        assert _relative_error(ours[i], exact[i]) <= bar
    constant = torch.full((1, columns), 1.1e6)
    y = getattr(fk, op)(constant)
    assert (y - (1.0 if op == "rms_norm" else 0.0)).abs().max() < 1e-6


def test_weight_gradients_of_many_rows_keep_their_digits():
    x = torch.randn(100000, 8, generator=seeded("rows")) + 2
    weight = torch.ones(8, requires_grad=True)
    (dweight,) = torch.autograd.grad(fk.rms_norm(x, weight), weight, torch.ones_like(x))
    exact = F.rms_norm(x.double(), (8,), eps=1e-6).sum(0)
    assert _relative_error(dweight, exact) < 1.5e-7


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(op, make):
    f = getattr(fk, op)
    x = make(array(2, 8))
    with raises(rf"{op}: weight: expected shape \(8,\) to fit x, got \(7,\)"):
        f(x, make(array(7)))
    with raises(rf"{op}: residual: expected shape \(2, 8\) to fit x, got \(3, 8\)"):
        f(x, residual=make(array(3, 8)))
    with raises(rf"{op}: residual: expected float32, the dtype of x, got float16"):
        f(x, residual=make(array(2, 8, dtype=np.float16)))
    with raises(rf"{op}: x: expected float32, float16 or bfloat16, got float64"):
        f(make(array(2, 8, dtype=np.float64)))
    with raises(rf"{op}: weight: expected float32, got float16"):
        f(x, make(array(8, dtype=np.float16)))
    with raises(rf"{op}: x: expected shape \(\.\.\., N\), got \(\)"):
        f(make(np.ones((), np.float32)))
    with raises(rf"{op}: eps: expected a number, got 'small'"):
        f(x, eps="small")
    with raises(rf"{op}: eps: expected a number, got NaN"):
        f(x, eps=float("nan"))
    with raises(rf"{op}: eps: expected at least 0, got -1"):
        f(x, eps=-1.0)
    with raises(rf"{op}: eps: expected a finite number, got inf"):
        f(x, eps=float("inf"))
    with raises(rf"{op}: weight: expected"):
        f(x, [1.0] * 8)
    with pytest.raises(TypeError):
        f(x, epsilon=1.0)


def test_what_is_no_tensor():
    with raises("rms_norm: x: expected a NumPy array, torch tensor or JAX array, got list"):
        fk.rms_norm([1.0, 2.0])

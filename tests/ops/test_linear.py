"""linear: a matrix product with bias, activation and residual."""

import functools

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
    WITH_GRADIENTS,
    Case,
    check_each_gradient_alone,
    check_finite_differences,
    convert,
    forward_and_gradients,
    lay_out,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def formula(activation):
    def linear(x, weight, bias=None, residual=None):
        y = ACTIVATIONS[activation](F.linear(x, weight, bias))
        return y if residual is None else y + residual

    return linear


def linear_case(rows, columns, depth, activation=None, bias=True, residual=False):
    """`rows` is a size or the leading dims."""
    leading = rows if isinstance(rows, tuple) else (rows,)

    def inputs(g):
        out = {
            "x": normal(g, *leading, depth),
            "weight": normal(g, columns, depth, scale=max(depth, 1) ** -0.5),
        }
        if bias:
            out["bias"] = normal(g, columns)
        if residual:
            out["residual"] = normal(g, *leading, columns)
        return out

    label = "x".join(map(str, leading)) + f",{columns},{depth},{activation}"
    label += f"{'+bias' if bias else ''}{'+residual' if residual else ''}"
    return Case(
        f"linear[{label}]",
        "linear",
        inputs,
        formula(activation),
        {"activation": activation},
        ("weight", "bias"),
        ("x", "weight", *(["bias"] if bias else []), *(["residual"] if residual else [])),
        # Gradients come from `before` as it is kept, rounded to x's dtype.
        sums=("bias", "weight", "x"),
    )


CASES = [
    *(linear_case(37, 50, 41, activation) for activation in ACTIVATIONS),
    linear_case(64, 128, 64, "gelu_tanh", residual=True),
    linear_case(1, 96, 72, "silu"),
    linear_case(5, 33, 200, "gelu", residual=True),
    linear_case(17, 1, 13),
    linear_case(1, 1, 1, "tanh", residual=True),
    linear_case((2, 3, 5), 24, 40, "relu", residual=True),
    linear_case((), 10, 12, "sigmoid", residual=True),
    linear_case(130, 264, 264, "relu2", bias=False),
    linear_case(300, 400, 600, bias=False, residual=True),
    linear_case(0, 8, 8, "gelu"),
    linear_case((3, 0), 8, 8, residual=True),
    linear_case(4, 0, 8, "silu"),
    linear_case(4, 8, 0, "gelu_tanh", residual=True),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("rows", [3, 40])
def test_strides(rows, backend, layout, dtype):
    case = linear_case((2, rows), 72, 48, "gelu", residual=True)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [3, 40])
def test_parameters_in_the_activations_dtype(rows, backend, dtype):
    case = linear_case(rows, 56, 88, "gelu_tanh")
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_leading_dims_that_are_no_matrix(backend, dtype):
    """Rows of x and of the residual that no single stride reaches."""
    case = linear_case((4, 5), 24, 32, "silu", residual=True)
    generator = seeded("leading")
    t = {k: v.to(getattr(torch, dtype)) for k, v in case.inputs(generator).items()}
    wide = torch.zeros(5, 9, 32, dtype=t["x"].dtype)
    wide[:, 2:6] = t["x"].transpose(0, 1)
    moved = {k: convert(lay_out(v, "contiguous"), backend) for k, v in t.items()}
    moved["x"] = convert(wide[:, 2:6].transpose(0, 1), backend)
    moved = {k: v.detach().requires_grad_() for k, v in moved.items()}
    plain = {k: convert(v, backend).detach().requires_grad_() for k, v in t.items()}
    outputs = [fk.linear(**m, activation="silu") for m in (moved, plain)]
    for y in outputs:
        y.sum().backward()
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=0)
    for k in t:
        torch.testing.assert_close(moved[k].grad, plain[k].grad, rtol=1e-5, atol=1e-5)


# Blocks of every size: more than one of K, of rows and of columns, and what is left over.
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize(
    "shape", [(515, 300, 523), (97, 1031, 257), (50, 200, 900), (16, 200, 700), (9, 70, 33)]
)
def test_large(shape, backend, dtype):
    case = linear_case(*shape, "gelu_tanh", residual=True)
    run_forward(case, backend, dtype)
    run_gradients(case, backend, dtype)


# Products of one row, of few steps of K, and of both.
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize(
    "shape", [(1, 16, 3000), (6, 1, 3000), (1, 1031, 257), (1, 300, 2), (15, 77, 200), (2, 130, 65)]
)
def test_thin(shape, backend, dtype):
    case = linear_case(*shape, None)
    run_forward(case, backend, dtype)
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(
    "case", [c for c in CASES if "0" not in str(c).split("[")[1].split(",")[:3]], ids=str
)
def test_finite_differences(case, backend):
    if "relu" in str(case):
        pytest.skip("a step may cross the corner")
    check_finite_differences(case, backend)


@hypothesis.given(
    rows=st.integers(0, 70),
    columns=st.integers(0, 90),
    depth=st.integers(0, 90),
    activation=st.sampled_from(list(ACTIVATIONS)),
    bias=st.booleans(),
    residual=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(rows, columns, depth, activation, bias, residual, dtype, backend):
    run_forward(linear_case(rows, columns, depth, activation, bias, residual), backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_only_what_is_asked_for(activation, backend):
    t = linear_case(20, 30, 40, activation, residual=True).inputs(seeded("asked"))
    t = {k: convert(v.float(), backend) for k, v in t.items()}
    check_each_gradient_alone(functools.partial(fk.linear, activation=activation), t)


def test_small_results_keep_their_digits():
    """Where an activation is nearly 0 it is right relative to itself."""
    x = np.linspace(-9, -1, 64, dtype=np.float32)[:, None]
    one = np.ones((1, 1), np.float32)
    exact = torch.from_numpy(x).double()
    for name in ("gelu", "silu", "sigmoid"):
        want = ACTIVATIONS[name](exact)
        if name == "gelu":
            want = 0.5 * exact * torch.erfc(-exact / 2**0.5)
        got = torch.from_numpy(fk.linear(x, one, activation=name)).double()
        assert ((got - want) / want).abs().max() < 1e-5, name


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    x, weight = make(array(2, 8)), make(array(5, 8))
    with raises(r"linear: weight: expected shape \(5, 8\) to fit x, got \(5, 7\)"):
        fk.linear(x, make(array(5, 7)))
    with raises(r"linear: bias: expected shape \(5,\) to fit weight, got \(4,\)"):
        fk.linear(x, weight, make(array(4)))
    with raises(r"linear: residual: expected shape \(2, 5\) to fit"):
        fk.linear(x, weight, residual=make(array(2, 6)))
    with raises(r"linear: weight: expected float32, got float16"):
        fk.linear(x, make(array(5, 8, dtype=np.float16)))
    with raises(r"linear: activation: expected"):
        fk.linear(x, weight, activation="swish")
    with raises(r"linear: x: expected float32, float16 or bfloat16, got float64"):
        fk.linear(make(array(2, 8, dtype=np.float64)), weight)

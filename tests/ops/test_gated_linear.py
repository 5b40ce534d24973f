"""gated_linear: two products of the same x, the activated one times the other."""

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
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)
from test_linear import ACTIVATIONS


def formula(activation):
    def gated(x, w_gate, w_up=None):
        if w_up is None:
            w_gate, w_up = w_gate.chunk(2)
        return ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up)

    return gated


def gated_case(rows, columns, depth, activation="silu", stacked=False, recompute=False):
    """`rows` is a size or the leading dims."""
    leading = rows if isinstance(rows, tuple) else (rows,)
    scale = max(depth, 1) ** -0.5

    def inputs(g):
        x = normal(g, *leading, depth)
        if stacked:
            return {"x": x, "w_gate": normal(g, 2 * columns, depth, scale=scale)}
        gate, up = (normal(g, columns, depth, scale=scale) for _ in range(2))
        return {"x": x, "w_gate": gate, "w_up": up}

    label = "x".join(map(str, leading)) + f",{columns},{depth},{activation}"
    label += f"{',stacked' if stacked else ''}{',recompute' if recompute else ''}"
    weights = ("w_gate",) if stacked else ("w_gate", "w_up")
    return Case(
        f"gated_linear[{label}]",
        "gated_linear",
        inputs,
        formula(activation),
        {"activation": activation, "recompute": recompute},
        weights,
        ("x", *weights),
        # Each term of a gradient has three factors with an error of their own.
        gradient_floor=2.0**-18,
        # Gradients come from gate and up as they are kept, rounded to x's dtype.
        sums=("x", *weights),
    )


CASES = [
    *(gated_case(37, 50, 41, activation) for activation in ACTIVATIONS),
    gated_case(37, 50, 41, "gelu", stacked=True),
    gated_case(64, 128, 64, "silu", recompute=True),
    gated_case(64, 128, 64, "gelu_tanh", stacked=True, recompute=True),
    gated_case(1, 96, 72),
    gated_case(5, 33, 200, "gelu", stacked=True),
    gated_case(5, 33, 200, "tanh", recompute=True),
    gated_case(17, 1, 13, stacked=True),
    gated_case(1, 1, 1, "tanh"),
    gated_case((2, 3, 5), 24, 40, "relu", stacked=True),
    gated_case((), 10, 12, "sigmoid", recompute=True),
    gated_case(130, 264, 264, "relu2"),
    gated_case(0, 8, 8, "gelu"),
    gated_case((3, 0), 8, 8, stacked=True, recompute=True),
    gated_case(4, 0, 8),
    gated_case(4, 0, 8, stacked=True),
    gated_case(4, 8, 0, "gelu_tanh", stacked=True),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("rows", [3, 40])
def test_strides(rows, backend, layout, dtype):
    for stacked in (False, True):
        case = gated_case((2, rows), 72, 48, "gelu", stacked, recompute=stacked)
        run_forward(case, backend, dtype, layout)
        if backend != "numpy":
            run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [3, 40])
def test_parameters_in_the_activations_dtype(rows, backend, dtype):
    case = gated_case(rows, 56, 88, "gelu_tanh", stacked=rows == 3)
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


# Blocks of every size: more than one of K, of rows and of columns, and what is left over.
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize(
    "shape", [(515, 300, 523), (97, 531, 257), (40, 200, 904), (16, 200, 700), (9, 70, 33)]
)
def test_large(shape, backend, dtype):
    for recompute in (False, True):
        case = gated_case(*shape, "gelu_tanh", stacked=recompute, recompute=recompute)
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
    stacked=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(rows, columns, depth, activation, stacked, dtype, backend):
    run_forward(gated_case(rows, columns, depth, activation, stacked), backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_only_what_is_asked_for(recompute, stacked, backend):
    t = gated_case(20, 30, 40, stacked=stacked).inputs(seeded("asked"))
    t = {k: convert(v.float(), backend) for k, v in t.items()}
    check_each_gradient_alone(functools.partial(fk.gated_linear, recompute=recompute), t)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stacked_is_the_same(backend):
    """One weight with both matrices gives the very numbers of two."""
    t = gated_case(40, 72, 56).inputs(seeded("stacked"))
    x, gate, up = (convert(v.float(), backend) for v in t.values())
    both = convert(torch.cat([t["w_gate"], t["w_up"]]).float(), backend)
    a, b = (np.asarray(fk.gated_linear(x, *w)) for w in ((gate, up), (both,)))
    assert (a == b).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept(recompute):
    """With `recompute` nothing of y's size stays in memory for the backward."""
    x, w = torch.randn(8, 16), torch.randn(24, 16, requires_grad=True)
    sizes = []

    def keep(t):
        sizes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fk.gated_linear(x, w, recompute=recompute)
    assert sizes.count((8, 12)) == (0 if recompute else 2)


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    x, gate = make(array(2, 8)), make(array(5, 8))
    with raises(r"gated_linear: w_up: expected shape \(5, 8\) to fit w_gate, got \(4, 8\)"):
        fk.gated_linear(x, gate, make(array(4, 8)))
    with raises(r"gated_linear: w_gate: expected shape \(2\*N, 8\) to fit x, got \(5, 8\)"):
        fk.gated_linear(x, gate)
    with raises(r"gated_linear: w_gate: expected shape \(5, 8\) to fit x, got \(5, 7\)"):
        fk.gated_linear(x, make(array(5, 7)), gate)
    with raises(r"gated_linear: activation: expected"):
        fk.gated_linear(x, gate, gate, activation="swish")

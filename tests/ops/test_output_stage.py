"""The output stage: an op that adds a residual and writes the norm of the sum gives what the op and
a norm with a residual give one after the other, and so do its gradients."""

import dataclasses
import functools
import math

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
    Case,
    as_tuple,
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
from test_gru import gru_case
from test_lstm import lstm_case
from test_selective_scan import scan_case

WITH_GRADIENTS = [b for b in BACKENDS if b != "numpy"]
TORCH_BACKENDS = [b for b in BACKENDS if b.startswith("torch")]

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def norm_of(y, norm, weight, bias, eps):
    if norm == "rms":
        return F.rms_norm(y, y.shape[-1:], weight, eps)
    return F.layer_norm(y, y.shape[-1:], weight, bias, eps)


def linear_case(rows, columns, depth, norm="rms", activation=None, residual=True, bias=True):
    """`rows` is a size or the leading dims; `bias` is that of the layer and of the norm."""
    leading = rows if isinstance(rows, tuple) else (rows,)
    eps = 1e-3

    def formula(x, weight, norm_weight, bias=None, norm_bias=None, residual=None):
        y = ACTIVATIONS[activation](F.linear(x, weight, bias))
        y = y if residual is None else y + residual
        return norm_of(y, norm, norm_weight, norm_bias, eps), y

    def inputs(g):
        out = {
            "x": normal(g, *leading, depth),
            "weight": normal(g, columns, depth, scale=max(depth, 1) ** -0.5),
            "norm_weight": normal(g, columns),
        }
        if bias:
            out["bias"] = normal(g, columns)
        if bias and norm == "layer":
            out["norm_bias"] = normal(g, columns)
        if residual:
            out["residual"] = normal(g, *leading, columns)
        return out

    label = f"{'x'.join(map(str, leading))},{columns},{depth},{norm},{activation}"
    return Case(
        f"linear[{label}{'+bias' if bias else ''}{'+residual' if residual else ''}]",
        "linear",
        inputs,
        formula,
        {"activation": activation, "norm": norm, "norm_eps": eps},
        ("weight", "bias", "norm_weight", "norm_bias"),
        ("x", "weight", "bias", "residual", "norm_weight", "norm_bias"),
        # Of one row torch's own error may be small by luck.
        floor=1e-6 if math.prod(leading) == 1 else 0.0,
        # Gradients come from outputs as they are kept, rounded to x's dtype.
        sums=("bias", "weight", "x", "norm_weight", "norm_bias"),
    )


def with_stage(case, norm="rms", residual=True, **differences):
    """The case of an op that has y (B, L, D) first among its outputs, and what follows y."""
    eps = 1e-3

    def formula(*, norm_weight=None, norm_bias=None, residual=None, **tensors):
        y, *others = as_tuple(case.formula(**tensors))
        y = y if residual is None else y + residual
        if norm_weight is None:
            return (y, *others) if others else y
        return norm_of(y, norm, norm_weight, norm_bias, eps), y, *others

    def inputs(generator):
        out = case.inputs(generator)
        # Of a scan y is like u; of a recurrent net as wide as the state that w_hh multiplies.
        shape = out["u"].shape if "u" in out else (*out["x"].shape[:2], out["w_hh"].shape[1])
        if residual:
            out["residual"] = normal(generator, *shape)
        if norm is not None:
            out["norm_weight"] = normal(generator, shape[-1])
        if norm == "layer":
            out["norm_bias"] = normal(generator, shape[-1])
        return out

    of_stage = ("norm_weight", "norm_bias")
    return dataclasses.replace(
        case,
        name=f"{case.name}-{norm}{'+residual' if residual else ''}",
        inputs=inputs,
        formula=formula,
        attributes={**case.attributes, **({"norm": norm, "norm_eps": eps} if norm else {})},
        parameters=(*case.parameters, *of_stage),
        differentiable=(*case.differentiable, "residual", *of_stage),
        sums=(*case.sums, *of_stage),
        **differences,
    )


LINEAR_CASES = [
    *(linear_case(37, 50, 41, n, a) for n in ("rms", "layer") for a in ACTIVATIONS),
    linear_case(1, 96, 72, "layer", "silu"),
    linear_case(5, 136, 200, "rms", residual=False),
    linear_case(60, 256, 256, "rms", bias=False),
    linear_case(130, 264, 264, "layer", bias=False),
    linear_case((2, 3, 5), 24, 40, "layer", "silu"),
    linear_case((), 10, 12, residual=False),
    linear_case(300, 400, 33, "layer", "gelu_tanh"),
    linear_case(9, 1031, 64, "rms", "silu"),
    linear_case(
        1100, 24, 16, "layer", "silu"
    ),  # pieces of more rows than go through the norm at once
    linear_case(0, 8, 8, "layer"),
    linear_case((3, 0), 8, 8),
    linear_case(4, 8, 0, "layer", "gelu_tanh"),
    # A GPU's kernel of few rows writes their norm: all in one block, in several, and with K split.
    linear_case(1, 16, 64, "layer"),
    linear_case(3, 256, 256, "rms", "silu"),
    linear_case(16, 528, 128, "layer"),
    linear_case(2, 1024, 64, "rms", bias=False),
    linear_case(1, 64, 4096, "layer"),
    linear_case(20, 64, 2048, "rms"),
]
# The norm of rows that are small here and there makes its input's error large.
scan_stage = functools.partial(with_stage, floor=1e-5, gradient_floor=3e-4)
SCAN_CASES = [
    scan_stage(scan_case(), "rms"),
    scan_stage(scan_case(optional=False, delta_softplus=True), "layer", residual=False),
    scan_stage(scan_case(groups=1, initial=True, return_last_state=True), "layer"),
    scan_stage(scan_case(b=1, length=130, d=40, n=3), None),
    scan_stage(scan_case(b=1, length=60, d=256, n=16, delta_softplus=True), "rms"),
    scan_stage(scan_case(b=2, length=300, d=300, n=4, delta_softplus=True), "layer"),
    scan_stage(scan_case(lengths=(3, 0, 70, 1, 26), groups=1, return_last_state=True), "rms"),
    scan_stage(scan_case(b=3, length=20, d=1, n=2), "layer"),
    *(scan_stage(scan_case(algorithm=a), "layer") for a in ("blelloch", "chunked")),
]
RECURRENT_CASES = [
    with_stage(lstm_case(), "rms"),
    with_stage(lstm_case(reverse=True, b=3, length=7, inputs=5, hidden=16), "layer"),
    with_stage(lstm_case(outputs=20, b=5, length=6, hidden=40, inputs=17), "rms", residual=False),
    with_stage(lstm_case(lengths=(3, 0, 6, 1), hidden=9), None),
    with_stage(lstm_case(b=1, length=40, inputs=20, hidden=64), "layer"),
    with_stage(lstm_case(b=3, length=0), "layer"),
    with_stage(gru_case(), "layer"),
    with_stage(gru_case(bias=False, states=False, b=1, length=9, hidden=33), "rms"),
    with_stage(gru_case(lengths=(2, 5, 4, 7, 1), hidden=18, reset_after=False, reverse=True), None),
    with_stage(gru_case(b=9, length=3, hidden=70, inputs=31), "layer", residual=False),
    with_stage(gru_case(b=0, length=4), "rms"),
]
CASES = [*LINEAR_CASES, *SCAN_CASES, *RECURRENT_CASES]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("rows", [3, 40])
def test_strides(rows, backend, layout, dtype):
    case = linear_case((2, rows), 72, 48, "layer", "silu")
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


# On GPUs W_ih's gradient is a product of bfloat16 parts, here of 10 positions: by the layout of its
# operands it is off by up to 3.3 times torch's error, 2.1e-6.
STRIDED = [
    scan_stage(scan_case(b=2, length=21, d=40, delta_softplus=True), "layer"),
    with_stage(lstm_case(b=2, length=5, hidden=24), "layer", gradient_floor=3e-6),
    with_stage(gru_case(b=2, length=5, hidden=24), "rms"),
]


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_strides_of_sequences(case, backend, layout, dtype):
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", ("rms", "layer"))
def test_parameters_in_the_activations_dtype(norm, backend, dtype):
    case = linear_case(40, 56, 88, norm, "gelu_tanh")
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(
    "case", [c for c in LINEAR_CASES if "0" not in str(c).split("[")[1].split(",")[:3]], ids=str
)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@hypothesis.given(
    rows=st.integers(0, 70),
    columns=st.integers(0, 300),
    depth=st.integers(0, 90),
    norm=st.sampled_from(["rms", "layer"]),
    residual=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(rows, columns, depth, norm, residual, dtype, backend):
    run_forward(linear_case(rows, columns, depth, norm, "silu", residual), backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ("rms", "layer"))
@pytest.mark.parametrize("rows", [1, 60, 515])
def test_same_as_the_norm_of_the_sum(rows, norm, dtype, backend):
    """y is what it is without a norm, bit for bit, and the norm is that of y as it was rounded."""
    t = linear_case(rows, 256, 256, norm).inputs(seeded("same"))
    t = {k: convert(v.to(getattr(torch, dtype)), backend) for k, v in t.items()}
    scale, shift = t.pop("norm_weight"), t.pop("norm_bias", None)
    y = fk.linear(**t)
    normed, same_y = fk.linear(**t, norm=norm, norm_weight=scale, norm_bias=shift, norm_eps=1e-5)
    assert torch.equal(y, same_y)
    if norm == "rms":
        expected = fk.rms_norm(y, scale, eps=1e-5)
    else:
        expected = fk.layer_norm(y, scale, shift, eps=1e-5)
    tolerance = 1e-6 if dtype == "float32" else torch.finfo(y.dtype).eps
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("which", [0, 1])
def test_only_what_is_asked_for(which, activation, backend):
    """One gradient at a time, of one of the outputs at a time."""
    t = linear_case(20, 30, 40, "layer", activation).inputs(seeded("asked"))
    t = {k: convert(v.float(), backend) for k, v in t.items()}
    # What only the norm has is not asked for.
    fixed = {k: t.pop(k) for k in ("norm_weight", "norm_bias")} if which == 1 else {}
    call = functools.partial(fk.linear, activation=activation, norm="layer", **fixed)
    check_each_gradient_alone(lambda **leaves: call(**leaves)[which], t)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_the_norms_parameters_get_nothing_from_y(backend):
    t = linear_case(6, 16, 8, "layer").inputs(seeded("nothing"))
    t = {k: convert(v.float(), backend).requires_grad_() for k, v in t.items()}
    _, y = fk.linear(**t, norm="layer")
    y.sum().backward()
    assert not t["norm_weight"].grad.any()
    assert not t["norm_bias"].grad.any()


@pytest.mark.parametrize("backend", WITH_GRADIENTS)
def test_repeats_bit_for_bit(backend):
    case = linear_case(515, 300, 64, "layer", "silu")
    first, second = (run_forward(case, backend, "float32") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_rows_of_any_stride(backend):
    """A residual and cotangents whose rows no single stride reaches."""
    case = linear_case((4, 5), 24, 32, "rms", "silu")
    t = {k: v.float() for k, v in case.inputs(seeded("rows")).items()}
    wide = torch.zeros(5, 9, 24)
    wide[:, 2:6] = t["residual"].transpose(0, 1)
    plain = {k: convert(lay_out(v, "contiguous"), backend).requires_grad_() for k, v in t.items()}
    moved = {k: v.detach().clone().requires_grad_() for k, v in plain.items()}
    moved["residual"] = convert(wide[:, 2:6].transpose(0, 1), backend).requires_grad_()
    g = convert(normal(seeded("g"), 5, 4, 24).float(), backend).transpose(0, 1)
    for given, cotangent in ((plain, g.contiguous()), (moved, g)):
        torch.autograd.backward(fk.linear(**given, activation="silu"), (cotangent, cotangent))
    for k in t:
        torch.testing.assert_close(moved[k].grad, plain[k].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    ones = functools.partial(np.ones, dtype=np.float32)
    x, weight, five = make(ones((2, 8))), make(ones((5, 8))), make(ones(5))
    with raises(r"linear: norm_weight: expected shape \(5,\) to fit weight, got \(4,\)"):
        fk.linear(x, weight, norm_weight=make(ones(4)))
    with raises("linear: norm_bias: expected none without norm_weight, got a tensor"):
        fk.linear(x, weight, norm_bias=five)
    with raises('linear: norm_bias: expected none with norm="rms", got a tensor'):
        fk.linear(x, weight, norm_weight=five, norm_bias=five)
    with raises('linear: norm_weight: expected a tensor with norm="layer", got none'):
        fk.linear(x, weight, norm="layer")
    with raises("linear: norm: expected"):
        fk.linear(x, weight, norm_weight=five, norm="batch")
    with raises("linear: norm_eps: expected at least 0"):
        fk.linear(x, weight, norm_weight=five, norm_eps=-1.0)

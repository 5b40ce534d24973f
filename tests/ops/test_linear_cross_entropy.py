"""linear_cross_entropy: the loss of a language model's head."""

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
    check_finite_differences,
    convert,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)


def formula(softcap=0.0, return_lse=False, **attributes):
    def call(x, weight, targets, bias=None):
        logits = F.linear(x, weight, bias)
        # Losses are float32 whatever the logits are.
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(logits, targets.long(), **attributes)
        return (loss, torch.logsumexp(logits, -1)) if return_lse else loss

    return call


def head_case(n, v, k, ignored=0, index=torch.int64, bias=False, scale=2.0, **attributes):
    def inputs(g):
        targets = torch.randint(0, max(v, 1), (n,), generator=g).to(index)
        targets[:ignored] = attributes.get("ignore_index", -100)
        out = {
            "x": normal(g, n, k),
            "weight": normal(g, v, k, scale=scale * max(k, 1) ** -0.5),
            "targets": targets,
        }
        if bias:
            out["bias"] = normal(g, v)
        return out

    extra = "".join(f",{k}={a}" for k, a in attributes.items())
    return Case(
        f"linear_cross_entropy[{n}x{v}x{k},ignored={ignored},{index},bias={bias}{extra}]",
        "linear_cross_entropy",
        inputs,
        formula(**attributes),
        attributes,
        ("weight", "bias"),
        ("x", "weight", *(["bias"] if bias else [])),
        # Sums over all classes, or all rows, of gradients that may be rounded to x's dtype.
        sums=("x", "weight", "bias"),
    )


CASES = [
    head_case(37, 50, 41),
    head_case(20, 300, 64, bias=True, reduction="sum"),
    head_case(20, 130, 33, ignored=3, bias=True, reduction="none", index=torch.int32),
    head_case(40, 513, 24, ignored=7, label_smoothing=0.1, bias=True),
    head_case(18, 70, 16, label_smoothing=1.0),
    head_case(33, 200, 40, softcap=3.0, bias=True, scale=6.0),
    head_case(33, 200, 40, softcap=2.0, return_lse=True, label_smoothing=0.2, ignored=2),
    head_case(5, 64, 48, return_lse=True, reduction="none"),
    head_case(1, 1000, 72),
    head_case(16, 129, 8, ignored=1, ignore_index=7),
    head_case(3, 1, 5, bias=True),
    head_case(1, 1, 1),
    head_case(9, 30, 0, bias=True, reduction="sum"),
    head_case(0, 10, 8, reduction="sum", bias=True),
    head_case(0, 10, 8, reduction="none", return_lse=True),
]
test_forward, test_gradients = forward_and_gradients(CASES)


# More than one block of rows, of classes and of K.
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
def test_large(backend, dtype):
    case = head_case(300, 1111, 270, ignored=11, bias=True, softcap=20.0, return_lse=True)
    run_forward(case, backend, dtype)
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout, dtype):
    case = head_case(24, 72, 48, ignored=2, bias=True)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_in_the_activations_dtype(backend, dtype):
    case = head_case(40, 150, 64, bias=True)
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "[0x" not in str(c)], ids=str)
def test_finite_differences(case, backend):
    if "x0," in str(case):
        pytest.skip("nothing to differentiate by")
    check_finite_differences(case, backend)


@hypothesis.given(
    n=st.integers(0, 60),
    v=st.integers(1, 400),
    k=st.integers(0, 80),
    reduction=st.sampled_from(("none", "sum")),
    smoothing=st.sampled_from((0.0, 0.1)),
    softcap=st.sampled_from((0.0, 5.0)),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(n, v, k, reduction, smoothing, softcap, bias, dtype, backend):
    case = head_case(
        n, v, k, bias=bias, reduction=reduction, label_smoothing=smoothing, softcap=softcap
    )
    run_forward(case, backend, dtype)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_many_rows(dtype):
    """Chunks of rows in the forward, of classes in the backward."""
    generator = seeded("many rows")
    x = torch.randn(70000, 3, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(300, 3, generator=generator).to(x.dtype)
    targets = torch.randint(0, 300, (70000,), generator=generator)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    loss = fk.linear_cross_entropy(*leaves, targets)
    want = F.cross_entropy(F.linear(*exact), targets)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    got = torch.autograd.grad(loss, leaves)
    for g, w in zip(got, torch.autograd.grad(want, exact), strict=True):
        error = (g.double() - w).abs().max() / w.abs().max()
        assert error < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_only_what_is_asked_for(backend):
    """One gradient at a time equals that of all together."""
    t = head_case(20, 90, 32, bias=True).inputs(seeded("asked"))
    targets = convert(t.pop("targets"), backend)
    t = {k: convert(v.float(), backend) for k, v in t.items()}

    def gradients(names):
        leaves = {k: v.detach().requires_grad_(k in names) for k, v in t.items()}
        loss = fk.linear_cross_entropy(leaves["x"], leaves["weight"], targets, bias=leaves["bias"])
        return dict(zip(names, torch.autograd.grad(loss, [leaves[n] for n in names]), strict=True))

    together = gradients(list(t))
    for name in t:
        assert torch.equal(gradients([name])[name], together[name])


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_a_row_that_is_no_distribution_is_nan(backend):
    """NaN or infinity in a row of x shows in its loss, and in no other row's."""
    generator = seeded("nan")
    x = torch.randn(40, 24, generator=generator)
    weight = torch.randn(300, 24, generator=generator)
    x[3, 5], x[20, 1] = float("nan"), float("inf")
    targets = convert(torch.arange(40), backend)
    losses = fk.linear_cross_entropy(
        convert(x, backend), convert(weight, backend), targets, reduction="none"
    )
    assert losses.isnan().nonzero().flatten().tolist() == [3, 20]


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_ignored_rows_may_hold_anything(backend):
    """A row that does not count has a gradient of 0, whatever its logits are."""
    generator = seeded("ignored")
    x = torch.randn(20, 24, generator=generator)
    weight = torch.randn(100, 24, generator=generator)
    x[2] = 1e30
    targets = torch.arange(20)
    targets[2] = -100
    leaf = convert(x, backend).requires_grad_()
    loss = fk.linear_cross_entropy(leaf, convert(weight, backend), convert(targets, backend))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert (gradient[2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ignored_is_nan_for_the_mean_and_zero_for_the_sum(backend):
    x, weight = convert(torch.randn(3, 8), backend), convert(torch.randn(5, 8), backend)
    targets = convert(torch.full((3,), -100), backend)
    assert np.isnan(float(fk.linear_cross_entropy(x, weight, targets)))
    assert float(fk.linear_cross_entropy(x, weight, targets, reduction="sum")) == 0


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    x, weight = make(np.ones((4, 8), np.float32)), make(np.ones((10, 8), np.float32))
    targets = np.zeros(4, np.int64)
    targets[2] = 10
    with raises("linear_cross_entropy: targets: expected values from 0 to 9 .*, got 10 at row 2"):
        fk.linear_cross_entropy(x, weight, make(targets))
    good = make(np.zeros(4, np.int64))
    with raises("linear_cross_entropy: label_smoothing: expected 0 to 1, got 1.5"):
        fk.linear_cross_entropy(x, weight, good, label_smoothing=1.5)
    with raises("linear_cross_entropy: softcap: expected at least 0, got -1"):
        fk.linear_cross_entropy(x, weight, good, softcap=-1.0)
    with raises("linear_cross_entropy: reduction: expected one of 'none', 'mean', 'sum'"):
        fk.linear_cross_entropy(x, weight, good, reduction="average")
    with raises(r"linear_cross_entropy: weight: expected shape \(10, 8\) to fit x, got \(10, 7\)"):
        fk.linear_cross_entropy(x, make(np.ones((10, 7), np.float32)), good)
    with raises(r"linear_cross_entropy: bias: expected shape \(10,\) to fit weight"):
        fk.linear_cross_entropy(x, weight, good, bias=make(np.ones(9, np.float32)))

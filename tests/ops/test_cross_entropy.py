"""cross_entropy."""

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
    normal,
    raises,
    run_forward,
    run_gradients,
)


def formula(**attributes):
    def call(logits, targets):
        # Losses are float32 whatever the logits are.
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return F.cross_entropy(logits, targets.long(), **attributes)

    return call


def entropy_case(n, v, ignored=0, index=torch.int64, scale=3.0, **attributes):
    def inputs(g):
        targets = torch.randint(0, max(v, 1), (n,), generator=g).to(index)
        targets[:ignored] = attributes.get("ignore_index", -100)
        return {"logits": normal(g, n, v, scale=scale), "targets": targets}

    extra = "".join(f",{k}={a}" for k, a in attributes.items())
    return Case(
        f"cross_entropy[{n}x{v},ignored={ignored},{index}{extra}]",
        "cross_entropy",
        inputs,
        formula(**attributes),
        attributes,
        (),
        ("logits",),
    )


CASES = [
    entropy_case(5, 64),
    entropy_case(7, 33, reduction="none"),
    entropy_case(7, 33, reduction="sum", index=torch.int32),
    entropy_case(16, 1000, ignored=3),
    entropy_case(16, 1000, ignored=3, reduction="none", label_smoothing=0.1),
    entropy_case(9, 129, ignored=2, label_smoothing=0.2),
    entropy_case(9, 129, label_smoothing=1.0, reduction="sum"),
    entropy_case(4, 32001),
    entropy_case(3, 1),
    entropy_case(1, 50257, scale=30.0),
    entropy_case(6, 50, ignored=1, ignore_index=7),
    entropy_case(300, 12),
    entropy_case(0, 10, reduction="none"),
    entropy_case(0, 10, reduction="sum"),
]


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_smoothed_loss_does_not_see_what_all_logits_have_in_common(backend):
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) + 1e4
    targets = torch.arange(64)
    keywords = {"label_smoothing": 0.5, "reduction": "none"}
    exact = F.cross_entropy(logits.double(), targets, **keywords)
    ours = fk.cross_entropy(convert(logits, backend), convert(targets, backend), **keywords)
    same = F.cross_entropy(logits, targets, **keywords)
    assert (ours.cpu() - exact).abs().max() <= 2 * (same - exact).abs().max()
    lowest = convert(torch.full((1, 120), -3e38), backend)
    loss = fk.cross_entropy(lowest, convert(torch.tensor([0]), backend), label_smoothing=0.1)
    assert loss.item() == pytest.approx(np.log(120))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_smoothed_loss_of_a_target_without_mass_is_infinite(backend):
    logits = torch.tensor([[1.0, -float("inf"), 2.0], [1.0, 3.0, -float("inf")]])
    targets = torch.tensor([1, 0])
    keywords = {"label_smoothing": 0.1, "reduction": "none"}
    ours = fk.cross_entropy(convert(logits, backend), convert(targets, backend), **keywords)
    torch.testing.assert_close(ours.cpu(), F.cross_entropy(logits, targets, **keywords))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, backend, dtype):
    (loss,) = run_forward(case, backend, dtype)
    assert "float32" in str(loss.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, backend, dtype):
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout, dtype):
    case = entropy_case(12, 72, ignored=2)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "[0x" not in str(c)], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@hypothesis.given(
    n=st.integers(1, 40),
    v=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(("none", "mean", "sum")),
    smoothing=st.sampled_from((0.0, 0.1)),
    backend=st.sampled_from(BACKENDS),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_shape(n, v, dtype, reduction, smoothing, backend):
    case = entropy_case(n, v, reduction=reduction, label_smoothing=smoothing)
    run_forward(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_backward_in_place_uses_the_logits_memory(backend):
    values = torch.randn(6, 40)
    targets = convert(torch.randint(0, 40, (6,)), backend)
    plain = convert(values.clone(), backend).requires_grad_()
    (expected,) = torch.autograd.grad(fk.cross_entropy(plain, targets), plain)
    base = convert(values.clone(), backend).requires_grad_()
    logits = base * 1.0
    loss = fk.cross_entropy(logits, targets, inplace_backward=True)
    (gradient,) = torch.autograd.grad(loss, base)
    assert torch.equal(gradient, expected)
    assert torch.equal(logits.detach(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ignored_is_nan_for_the_mean_and_zero_for_the_sum(backend):
    logits, targets = torch.randn(3, 8), torch.full((3,), -100)
    logits, targets = convert(logits, backend), convert(targets, backend)
    assert np.isnan(float(fk.cross_entropy(logits, targets)))
    assert float(fk.cross_entropy(logits, targets, reduction="sum")) == 0


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    logits = make(np.ones((4, 10), np.float32))
    targets = np.zeros(4, np.int64)
    targets[2] = 10
    with raises("cross_entropy: targets: expected values from 0 to 9 .*, got 10 at row 2"):
        fk.cross_entropy(logits, make(targets))
    targets[2] = -1
    with raises("cross_entropy: targets: expected values from 0 to 9 .*, got -1 at row 2"):
        fk.cross_entropy(logits, make(targets))
    good = make(np.zeros(4, np.int64))
    with raises("cross_entropy: label_smoothing: expected 0 to 1, got 1.5"):
        fk.cross_entropy(logits, good, label_smoothing=1.5)
    with raises("cross_entropy: reduction: expected one of 'none', 'mean', 'sum', got 'average'"):
        fk.cross_entropy(logits, good, reduction="average")
    with raises(r"cross_entropy: targets: expected shape \(4,\) to fit logits, got \(3,\)"):
        fk.cross_entropy(logits, make(np.zeros(3, np.int64)))
    with raises("cross_entropy: targets: expected int32 or int64, got float32"):
        fk.cross_entropy(logits, make(np.zeros(4, np.float32)))
    with raises(r"cross_entropy: logits: expected shape \(N, V\), got \(4,\)"):
        fk.cross_entropy(make(np.ones(4, np.float32)), good)

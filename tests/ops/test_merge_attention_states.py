"""merge_attention_states against its formula in torch, and against attention over all keys."""

import math

import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    HAVE_JAX,
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    assert_close,
    check_finite_differences,
    convert,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
    to_float64,
)


def formula(outs, lses):
    alive = (lses > -math.inf) | lses.isnan()
    any_alive = alive.any(0)
    # Dead parts and places take no part in the gradient, so that none of it is NaN.
    shown = torch.where(alive | ~any_alive, torch.where(any_alive, lses, 0.0), -math.inf)
    lse = torch.logsumexp(shown, 0)
    weights = torch.exp(shown - lse) * alive
    weights = weights.transpose(-1, -2)[..., None]  # heads after tokens, as outs
    out = torch.where(alive.transpose(-1, -2)[..., None], weights * outs, 0.0).sum(0)
    return out, torch.where(any_alive, lse, -math.inf)


def merge_case(parts=3, b=2, length=17, h=3, e=64, *, packed=False, dead=0.0, spread=2.0):
    def inputs(generator):
        shape = (length,) if packed else (b, length)
        outs = normal(generator, parts, *shape, h, e)
        lses = normal(generator, parts, *shape[:-1], h, length, scale=spread)
        drawn = torch.rand(lses.shape, generator=generator, dtype=torch.float64)
        lses[drawn < dead] = -math.inf
        return {"outs": outs, "lses": lses}

    sizes = f"{length}x{h}x{e}" if packed else f"{b}x{length}x{h}x{e}"
    options = f"{',dead=' + str(dead) if dead else ''}{',spread=' + str(spread)}"
    return Case(
        f"merge[{parts}x{sizes}{options}]",
        "merge_attention_states",
        inputs,
        formula,
        parameters=("lses",),
        differentiable=("outs", "lses"),
        floor=1e-6,
        gradient_floor=1e-5,
    )


CASES = [
    merge_case(),
    merge_case(packed=True),
    merge_case(parts=1),
    merge_case(parts=2, e=128, dead=0.3),
    merge_case(parts=9, e=5, spread=30.0),
    merge_case(parts=2, dead=0.5, packed=True, e=80),
    merge_case(parts=2, dead=1.0),
    merge_case(parts=2, length=1, h=1, e=1),
    merge_case(parts=4, b=1, length=100, h=8, e=64),
    merge_case(parts=3, e=300),
    merge_case(parts=3, b=1, length=2, h=1, e=1000),
    merge_case(b=0),
    merge_case(length=0),
    merge_case(h=0),
    merge_case(e=0),
    merge_case(parts=0),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
@pytest.mark.parametrize("case", [merge_case(e=24, dead=0.2), merge_case(packed=True)], ids=str)
def test_strides(case, backend, layout, dtype):
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_finite_differences(backend):
    check_finite_differences(merge_case(parts=3, b=1, length=5, h=2, e=8), backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_one_gradient_at_a_time(backend):
    tensors = merge_case(dead=0.2).inputs(seeded("one at a time"))
    tensors = {n: convert(t.float(), backend) for n, t in tensors.items()}

    def gradients(*names):
        leaves = {n: t.clone().requires_grad_(n in names) for n, t in tensors.items()}
        out, lse = fk.merge_attention_states(**leaves)
        loss = out.square().sum() + lse[lse.isfinite()].sum()
        return torch.autograd.grad(loss, [leaves[n] for n in names])

    together = gradients("outs", "lses")
    torch.testing.assert_close(gradients("outs")[0], together[0])
    torch.testing.assert_close(gradients("lses")[0], together[1])


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_special_values(backend):
    outs = torch.ones(2, 1, 4, 1, 8)
    lses = torch.zeros(2, 1, 1, 4)
    lses[0, 0, 0, 0] = -math.inf
    outs[0, 0, 0] = math.nan  # a part that saw no key may hold anything
    lses[:, 0, 0, 1] = -math.inf
    lses[0, 0, 0, 2] = math.nan
    outs, lses = (convert(t, backend).requires_grad_() for t in (outs, lses))
    out, lse = fk.merge_attention_states(outs, lses)
    assert (out[0, 0] == 1).all() and lse[0, 0, 0] == 0
    assert (out[0, 1] == 0).all() and lse[0, 0, 1] == -math.inf
    assert out[0, 2].isnan().all() and lse[0, 0, 2].isnan()
    assert torch.allclose(lse[0, 0, 3].cpu(), torch.tensor(math.log(2)))
    (out[0, [0, 1, 3]].sum() + lse[0, 0, [0, 3]].sum()).backward()
    assert outs.grad[:, 0, [0, 1, 3]].isfinite().all() and (outs.grad[:, 0, 1] == 0).all()
    assert (outs.grad[0, 0, 0] == 0).all()
    assert (lses.grad[:, 0, 0, 1] == 0).all() and lses.grad[0, 0, 0, 0] == 0


# --- as it is meant -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_halves_of_the_keys(backend, dtype, causal):
    """Attention over two halves of the keys, merged, is attention over all of them, forward and
    backward. Causal: the first half is seen whole by queries that stand in the second."""
    generator = seeded("halves", dtype, causal)
    half = 24
    shapes = {"q": (2, half, 4, 32), "k": (2, 2 * half, 2, 32), "v": (2, 2 * half, 2, 16)}
    exact = {n: normal(generator, *s).to(getattr(torch, dtype)) for n, s in shapes.items()}
    weights = [normal(generator, 2, half, 4, 16), normal(generator, 2, 4, half)]

    def gradients(function, inputs, device):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        outputs = function(**leaves)
        loss = sum((o * w.to(o.dtype).to(device)).sum() for o, w in zip(outputs, weights, strict=1))
        return [*outputs, *torch.autograd.grad(loss, list(leaves.values()))]

    def whole(q, k, v):
        return fk.attention(q, k, v, causal=causal, return_lse=True)

    def in_halves(q, k, v):
        parts = [
            fk.attention(q, k[:, :half], v[:, :half], return_lse=True),
            fk.attention(q, k[:, half:], v[:, half:], causal=causal, return_lse=True),
        ]
        return fk.merge_attention_states(*zip(*parts, strict=True))

    inputs = {n: convert(t, backend) for n, t in exact.items()}
    device = inputs["q"].device
    expected = gradients(whole, inputs, device)
    merged = gradients(in_halves, inputs, device)
    # Each half's result is rounded before they are merged.
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), merged, expected, strict=True):
        a, b = to_float64(a), to_float64(b)
        limit = max(8 * unit, 1e-5) * max(1.0, b.abs().max().item())
        assert (a - b).abs().max().item() <= limit, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lists(backend, dtype):
    """A list, a tuple or one array: the same, each argument by itself."""
    tensors = merge_case(dead=0.2).inputs(seeded("lists", dtype))
    outs = convert(tensors["outs"].to(getattr(torch, dtype)), backend)
    lses = convert(tensors["lses"].float(), backend)
    expected = fk.merge_attention_states(outs, lses)
    for a, b in (
        (list(outs), list(lses)),
        (tuple(outs), lses),
        (outs, list(lses)),
    ):
        for ours, theirs in zip(fk.merge_attention_states(a, b), expected, strict=True):
            assert type(ours) is type(theirs) and ours.dtype == theirs.dtype
            assert_close(ours, theirs, theirs, dtype, 1.0, "list")


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_lists_compiled(backend):
    tensors = merge_case().inputs(seeded("compiled"))
    outs, lses = (convert(tensors[n].float(), backend).requires_grad_() for n in ("outs", "lses"))

    def merge(outs, lses):
        out, lse = fk.merge_attention_states(list(outs.unbind()), tuple(lses.unbind()))
        return out * 2, lse

    plain = merge(outs, lses)
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")(outs, lses)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b)
    gradients = [
        torch.autograd.grad(out.square().sum() + lse.sum(), (outs, lses))
        for out, lse in (plain, compiled)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(not HAVE_JAX, reason="needs JAX")
def test_lists_in_jax():
    import jax

    tensors = merge_case().inputs(seeded("jax"))
    outs, lses = (convert(tensors[n].float(), "jax") for n in ("outs", "lses"))

    def loss(outs, lses):
        out, lse = fk.merge_attention_states(outs, lses)
        return (out**2).sum() + lse.sum()

    whole = jax.jit(jax.grad(loss, (0, 1)))(outs, lses)
    parts = jax.jit(jax.grad(loss, (0, 1)))(list(outs), list(lses))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.stack(b))


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    def ones(*shape, dtype=np.float32):
        return make(np.ones(shape, dtype))

    outs, lses = ones(2, 1, 5, 3, 8), ones(2, 1, 3, 5)
    for message, arguments in [
        (r"outs: expected shape .* got \(3, 8\)", {"outs": ones(3, 8)}),
        (r"lses: expected shape .* got \(2, 1, 5, 3\)", {"lses": ones(2, 1, 5, 3)}),
        (r"lses: expected shape \(2, 1, 3, 5\) to fit outs, got \(2, 3, 5\)",
         {"lses": ones(2, 3, 5)}),
        (r"lses: expected shape .* got \(1, 1, 3, 5\)", {"lses": ones(1, 1, 3, 5)}),
        ("lses: expected float32, got float16", {"lses": ones(2, 1, 3, 5, dtype=np.float16)}),
        ("outs: expected a NumPy array, torch tensor or JAX array, got list", {"outs": []}),
        ("lses: expected at least 1 part, got none", {"lses": []}),
        (r"outs: part 1: expected shape \(1, 5, 3, 8\), as the first has, got \(1, 5, 3, 7\)",
         {"outs": [ones(1, 5, 3, 8), ones(1, 5, 3, 7)]}),
        ("outs: part 1: expected .*float32, as the first has, got .*float16",
         {"outs": [ones(1, 5, 3, 8), ones(1, 5, 3, 8, dtype=np.float16)]}),
        ("lses: part 1: expected .*, got float", {"lses": [ones(1, 3, 5), 1.0]}),
    ]:  # fmt: skip
        with raises(f"merge_attention_states: {message}"):
            fk.merge_attention_states(**{"outs": outs, "lses": lses, **arguments})


def test_parts_on_different_devices():
    outs, lses = torch.ones(2, 1, 5, 3, 8), torch.ones(2, 1, 3, 5)
    message = "part 1: expected device cpu, as the first has, got meta"
    with raises(f"merge_attention_states: outs: {message}"):
        fk.merge_attention_states([outs[0], outs[1].to("meta")], lses)
    with raises(f"merge_attention_states: lses: {message}"):
        fk.merge_attention_states(list(outs), [lses[0], lses[1].to("meta")])

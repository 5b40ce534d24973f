"""The attention written in Triton, on a GPU or in Triton's interpreter: held to the same error bar
as our own kernels."""

import math

import pytest
import torch

from harness import assert_close, normal, raises, seeded

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter (conftest.py)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# B, Lq, Lk, H, G, D, E
SHAPES = [
    (1, 1, 1, 1, 1, 16, 16),
    (2, 129, 131, 4, 2, 64, 64),
    (1, 300, 300, 2, 2, 128, 128),
    (2, 200, 70, 3, 1, 40, 24),
    (1, 77, 260, 2, 1, 64, 64),
    (1, 100, 90, 2, 1, 32, 96),
    (1, 70, 130, 1, 1, 256, 256),
    (1, 5, 0, 1, 1, 16, 16),
]


def formula(q, k, v, causal, scale):
    """(out, lse) in the inputs' own precision."""
    (lq, heads, d), (lk, kv_heads) = q.shape[1:], k.shape[1:3]
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)
        s = s.masked_fill(~seen, -math.inf)
    alive = (s > -math.inf).any(-1, keepdim=True)
    s = torch.where(alive, s, 0.0) if lk else s
    p = torch.softmax(s, -1) * alive
    lse = torch.logsumexp(s, -1).masked_fill(~alive[..., 0], -math.inf)
    return torch.einsum("bhij,bjhe->bihe", p, v), lse


def gradients(function, inputs, weights):
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    finite = outputs[1].isfinite()
    loss = (outputs[0] * weights[0].to(outputs[0].dtype)).sum()
    loss = loss + (outputs[1][finite] * weights[1].to(outputs[1].dtype)[finite]).sum()
    return outputs, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_attention(shape, dtype, causal, scale=None):
    from flashkernel.triton import attention

    b, lq, lk, h, g, d, e = shape
    generator = seeded("triton", shape, dtype, causal)
    sizes = ((b, lq, h, d), (b, lk, g, d), (b, lk, g, e), (b, lq, h, e), (b, h, lq))
    q, k, v, *weights = (normal(generator, *size).to(dtype).to(DEVICE) for size in sizes)

    exact, exact_gradients = gradients(
        lambda *t: formula(*t, causal, scale), [t.double() for t in (q, k, v)], weights
    )
    same, same_gradients = gradients(lambda *t: formula(*t, causal, scale), (q, k, v), weights)
    ours, our_gradients = gradients(
        lambda *t: attention(*t, causal=causal, scale=scale, return_lse=True), (q, k, v), weights
    )
    name = str(dtype).removeprefix("torch.")
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    # Triton's interpreter multiplies by NumPy, in another order on each machine, and these kernels
    # are for comparison: their bars are wider than ours.
    assert_close(ours[0], exact[0], same[0], name, 4.0, "out", 2e-6)
    assert_close(ours[1], exact[1], same[1], "float32", 4.0, "lse", 2e-6)
    for what, o, x, s in zip("qkv", our_gradients, exact_gradients, same_gradients, strict=True):
        assert o.dtype == dtype
        assert_close(o, x, s, name, 8.0, f"d{what}", 1e-5)


def test_scale():
    test_attention((1, 70, 70, 2, 1, 32, 32), torch.float32, True, scale=-0.3)


def test_strides():
    """Heads before rows, and a last dim that is not the fast one."""
    from flashkernel.triton import attention

    q, k, v = (torch.randn(2, 3, 50, 32, device=DEVICE).transpose(1, 2) for _ in range(3))
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), expected)
    odd = torch.randn(2, 50, 32, 3, device=DEVICE).transpose(2, 3)
    expected = attention(odd.contiguous(), k, v)
    torch.testing.assert_close(attention(odd, k, v), expected)


def test_errors():
    from flashkernel.triton import attention

    q = torch.randn(1, 4, 2, 16, device=DEVICE)
    with raises("triton.attention: k: expected a number of heads that divides q's 2, got 4"):
        attention(q, q.repeat(1, 1, 2, 1), q.repeat(1, 1, 2, 1))
    with raises("triton.attention: q: expected a torch tensor on a GPU, got meta"):
        attention(q.to("meta"), q, q)
    with raises("triton.attention: v: expected float32"):
        attention(q, q, q.half())

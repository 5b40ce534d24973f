"""Mamba-2's scan written in Triton, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from harness import assert_close, normal, raises, seeded

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU or Triton's interpreter",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# (B, L, H, P, G, N), dtype, with D, z and dt_bias. Each is a compilation of seconds.
CASES = [
    ((2, 70, 4, 8, 2, 5), torch.float32, True),
    ((1, 40, 2, 16, 1, 16), torch.bfloat16, True),
    ((1, 33, 2, 20, 2, 16), torch.float32, False),
]


def formula(x, dt, A, B, C, D=None, z=None, dt_bias=None):
    dt = torch.nn.functional.softplus(dt if dt_bias is None else dt + dt_bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state, outputs = 0.0, []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(outputs, 1)
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * torch.nn.functional.silu(z)


def draw(shape, dtype, optional):
    b, length, h, p, g, n = shape
    generator = seeded("triton ssd", shape)
    tensors = {
        "x": normal(generator, b, length, h, p),
        "dt": normal(generator, b, length, h),
        "A": -torch.exp(normal(generator, h)),
        "B": normal(generator, b, length, g, n),
        "C": normal(generator, b, length, g, n),
    }
    if optional:
        tensors |= {"D": normal(generator, h), "z": normal(generator, b, length, h, p)}
        tensors["dt_bias"] = normal(generator, h)
    kept = ("A", "D", "dt_bias")
    return {k: t.to(torch.float32 if k in kept else dtype).to(DEVICE) for k, t in tensors.items()}


def gradients(function, tensors, weight):
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
    y = function(**leaves)
    return y, torch.autograd.grad((y * weight.to(y.dtype)).sum(), list(leaves.values()))


@pytest.mark.parametrize(("shape", "dtype", "optional"), CASES, ids=str)
def test_ssd(shape, dtype, optional):
    from flashkernel.triton import ssd

    tensors = draw(shape, dtype, optional)
    weight = torch.randn(tensors["x"].shape, device=DEVICE).bfloat16()
    exact, exact_gradients = gradients(formula, {k: t.double() for k, t in tensors.items()}, weight)
    same, same_gradients = gradients(formula, {k: t.to(dtype) for k, t in tensors.items()}, weight)
    ours, our_gradients = gradients(lambda **t: ssd(**t, dt_softplus=True), tensors, weight)
    name = str(dtype).removeprefix("torch.")
    # Triton's interpreter multiplies by NumPy, in another order on each machine, and these kernels
    # are for comparison: their bars are wider than ours.
    assert_close(ours, exact, same, name, 4.0, "y", 2e-6)
    for k, o, e, s in zip(tensors, our_gradients, exact_gradients, same_gradients, strict=True):
        assert_close(o, e, s, str(o.dtype).removeprefix("torch."), 32.0, f"d{k}", 3e-5)


def test_errors():
    from flashkernel.triton import ssd

    t = draw(*CASES[0])
    with raises("ssd: expected x .B, L, H, P. and B, C"):
        ssd(t["x"][0], t["dt"], t["A"], t["B"], t["C"])
    with raises("ssd: D: expected shape .4,., got .4, 8."):
        ssd(t["x"], t["dt"], t["A"], t["B"], t["C"], torch.ones(4, 8))

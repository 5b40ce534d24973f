"""The selective scan written in Triton, on a GPU or in its interpreter. The bar for its gradients
is 8 times torch's own error, not 3: a scan in parallel rounds products of decays that a walk
through time never makes, and the gradient of dt A is taken from a difference."""

import pytest
import torch

from harness import assert_close, normal, raises, seeded

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter (conftest.py)

softplus, silu = torch.nn.functional.softplus, torch.nn.functional.silu
# (B, L, D, N), dtype, with D, z and delta_bias. Each is a compilation of seconds.
# In the interpreter it is seconds of scanning, and the sizes are less.
SMALL, LARGE = (
    ((2, 33, 17, 5), (1, 100, 70, 16)) if DEVICE == "cuda" else ((2, 33, 3, 5), (1, 70, 2, 16))
)
CASES = [
    (SMALL, torch.float32, True),
    (SMALL, torch.float16, True),
    (SMALL, torch.bfloat16, True),
    (LARGE, torch.float32, False),
]


def formula(u, delta, A, B, C, D=None, z=None, delta_bias=None):
    dt = softplus(delta if delta_bias is None else delta + delta_bias)
    state, outputs = 0.0, []
    for t in range(u.shape[1]):
        step = dt[:, t, :, None]
        state = torch.exp(step * A) * state + step * B[:, t, None] * u[:, t, :, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    y = torch.stack(outputs, 1)
    y = y if D is None else y + D * u
    return y if z is None else y * silu(z)


def draw(shape, dtype, optional=True):
    b, length, d, n = shape
    generator = seeded("triton scan", shape)
    tensors = {
        "u": normal(generator, b, length, d),
        "delta": normal(generator, b, length, d),
        "A": -torch.exp(normal(generator, d, n)),
        "B": normal(generator, b, length, n),
        "C": normal(generator, b, length, n),
    }
    if optional:
        tensors |= {"D": normal(generator, d), "z": normal(generator, b, length, d)}
        tensors["delta_bias"] = normal(generator, d)
    kept = ("A", "D", "delta_bias")
    return {k: t.to(torch.float32 if k in kept else dtype).to(DEVICE) for k, t in tensors.items()}


def gradients(function, tensors, weight):
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
    y = function(**leaves)
    return y, torch.autograd.grad((y * weight.to(y.dtype)).sum(), list(leaves.values()))


@pytest.mark.parametrize("shape, dtype, optional", CASES, ids=str)
def test_selective_scan(shape, dtype, optional):
    from flashkernel.triton import selective_scan

    tensors = draw(shape, dtype, optional)
    weight = torch.randn(shape[:3], device=DEVICE).bfloat16()
    exact, exact_gradients = gradients(formula, {k: t.double() for k, t in tensors.items()}, weight)
    same, same_gradients = gradients(formula, {k: t.to(dtype) for k, t in tensors.items()}, weight)
    ours, our_gradients = gradients(
        lambda **t: selective_scan(**t, delta_softplus=True), tensors, weight
    )
    name = str(dtype).removeprefix("torch.")
    # Triton's interpreter multiplies by NumPy, in another order on each machine, and these kernels
    # are for comparison: their bars are wider than ours.
    assert_close(ours, exact, same, name, 4.0, "y", 1e-5)
    for k, o, e, s in zip(tensors, our_gradients, exact_gradients, same_gradients, strict=True):
        assert o.dtype == tensors[k].dtype
        kind = str(o.dtype).removeprefix("torch.")
        assert_close(o, e, s, kind, 16.0, f"d{k}", 1e-4)


def test_time_contiguous():
    from flashkernel.triton import selective_scan

    tensors = draw(SMALL, torch.float32)
    expected = selective_scan(**tensors, delta_softplus=True)
    turned = {
        k: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 3 else t
        for k, t in tensors.items()
    }
    torch.testing.assert_close(selective_scan(**turned, delta_softplus=True), expected)


def test_errors():
    from flashkernel.triton import selective_scan

    tensors = draw((1, 4, 3, 2), torch.float32)
    with raises("triton.selective_scan: B: expected shape .1, 4, 2., got .1, 3, 2."):
        selective_scan(**{**tensors, "B": tensors["B"][:, :3]})
    with raises("triton.selective_scan: z: expected torch.float32, got torch.float16"):
        selective_scan(**{**tensors, "z": tensors["z"].half()})
    with raises("triton.selective_scan: u: expected a tensor on a GPU, got meta"):
        selective_scan(**{**tensors, "u": tensors["u"].to("meta")})

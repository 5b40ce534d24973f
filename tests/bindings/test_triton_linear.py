"""The linear layer written in Triton, on a GPU or in Triton's interpreter: held to the same error
bar as our own kernels and, on a GPU, compared with them."""

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from harness import assert_close, normal, raises, seeded

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter (conftest.py)

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(shape, dtype):
    m, n, k = shape
    generator = seeded("triton linear", shape, dtype)
    sizes = {"x": (m, k), "weight": (n, k), "bias": (n,)}
    return {name: normal(generator, *s).to(dtype).to(DEVICE) for name, s in sizes.items()}


def gradients(function, tensors, cotangent):
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
    y = function(**leaves)
    return y, torch.autograd.grad(y, list(leaves.values()), cotangent.to(y.dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 90, 100), (1, 65, 33)], ids=str)
def test_linear(shape, dtype, activation):
    from flashkernel.triton import linear

    def formula(x, weight, bias):
        return ACTIVATIONS[activation](F.linear(x, weight, bias))

    tensors = draw(shape, dtype)
    cotangent = torch.randn(shape[:2], device=DEVICE).bfloat16()
    exact, exact_gradients = gradients(
        formula, {k: t.double() for k, t in tensors.items()}, cotangent
    )
    same, same_gradients = gradients(formula, tensors, cotangent)
    ours, our_gradients = gradients(
        lambda **t: linear(**t, activation=activation), tensors, cotangent
    )
    name = str(dtype).removeprefix("torch.")
    # Triton's interpreter multiplies by NumPy, in another order on each machine, and these kernels
    # are for comparison: their bars are wider than ours.
    assert_close(ours, exact, same, name, 4.0, "y", 2e-6)
    # The gradient's terms are made of `before` as it is kept, rounded.
    least = 32 * torch.finfo(dtype).eps * max(g.abs().max().item() for g in exact_gradients)
    for k, o, e, s in zip(tensors, our_gradients, exact_gradients, same_gradients, strict=True):
        assert o.dtype == dtype
        assert_close(o, e, s, name, 8.0, f"d{k}", least / 16)


def test_strides_and_leading_dims():
    from flashkernel.triton import linear

    x = torch.randn(3, 20, 5, device=DEVICE).transpose(1, 2)
    weight = torch.randn(20, 12, device=DEVICE).t()
    expected = F.gelu(F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight, activation="gelu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_our_kernel():
    from flashkernel.triton import linear

    tensors = {k: t.cuda() for k, t in draw((300, 200, 100), torch.bfloat16).items()}
    ours = fk.linear(**tensors, activation="gelu_tanh")
    torch.testing.assert_close(
        linear(**tensors, activation="gelu_tanh"), ours, rtol=2e-2, atol=2e-2
    )


def test_errors():
    from flashkernel.triton import linear

    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    with raises(r"triton.linear: weight: expected shape \(N, 8\) to fit x, got \(5, 7\)"):
        linear(x, weight[:, :7])
    with raises(r"triton.linear: bias: expected shape \(5,\) to fit weight, got \(4,\)"):
        linear(x, weight, weight[0, :4])
    with raises("triton.linear: x: expected a torch tensor on a GPU, got meta"):
        linear(x.to("meta"), weight)
    with raises("triton.linear: activation: expected one of"):
        linear(x, weight, activation="swish")

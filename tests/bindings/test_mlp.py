"""fk.torch.MLP beside the same network in torch's own ops."""

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from flashkernel.torch import MLP

ACTIVATIONS = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu}
KINDS = [
    {},
    {"norm": "layer", "bias": True, "activation": "relu"},
    {"norm": None, "residual": False, "hidden": 40},
    {"gated": True},
    {"gated": True, "recompute": True, "activation": "gelu_tanh"},
]


def linear(layer, x):
    return F.linear(x, layer.weight, layer.bias)


def plain(mlp: MLP, x):
    """The same network in torch's ops, of the modules that the MLP holds."""
    h = x if mlp.norm is None else mlp.norm(x)
    act = ACTIVATIONS[mlp.activation]
    h = act(linear(mlp.up, h)) if mlp.gate is None else act(linear(mlp.gate, h)) * linear(mlp.up, h)
    y = linear(mlp.down, h)
    return x + y if mlp.residual else y


def make(kind):
    torch.manual_seed(0)
    mlp = MLP(24, **kind)
    for p in mlp.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return mlp, torch.randn(3, 5, 24, requires_grad=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_torch(kind):
    mlp, x = make(kind)
    results = []
    for function in (mlp, lambda t: plain(mlp, t)):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=str)
def test_compiled(kind):
    mlp, x = make(kind)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    results = []
    for function in (mlp, compiled):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_autocast(kind):
    mlp, x = make(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = mlp(x), plain(mlp, x)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
    ours.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in mlp.parameters())


def test_state_dict():
    mlp, x = make({"gated": True})
    names = ["norm.weight", "gate.weight", "up.weight", "down.weight"]
    assert list(mlp.state_dict()) == names
    assert mlp.up.weight.shape == (64, 24)  # 8/3 of 24, rounded up to a multiple of 64
    again = MLP(24, gated=True)
    again.load_state_dict(mlp.state_dict())
    assert torch.equal(again(x), mlp(x))
    assert list(MLP(24, norm="layer", bias=True).state_dict()) == [
        "norm.weight",
        "norm.bias",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert MLP(24, dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_errors():
    with pytest.raises(fk.Error, match="MLP: norm: expected 'rms', 'layer' or None, got 'batch'"):
        MLP(8, norm="batch")
    with pytest.raises(fk.Error, match="MLP: bias: expected False with gated"):
        MLP(8, gated=True, bias=True)
    with pytest.raises(fk.Error, match="linear: activation: expected one of"):
        MLP(8, activation="swish")(torch.ones(2, 8))

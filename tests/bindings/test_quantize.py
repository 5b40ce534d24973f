"""fk.torch.quantize: its errors beside the rounding it promises, and what becomes of a module."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from flashkernel.torch import backbones, quantize

# With the most that 8 bits may change the output, as a share of its root mean square.
NETS = {
    "MLP": (lambda: backbones.MLP(), 0.015),
    "Mamba": (lambda: backbones.Mamba(), 0.015),
    "Attention": (lambda: backbones.Attention(), 0.015),
    "LSTM": (lambda: backbones.LSTM(), 0.015),
    "GRU": (lambda: backbones.GRU(), 0.015),
    "Jamba": (lambda: backbones.Jamba(layers=3), 0.015),
    "GatedSSM": (lambda: backbones.GatedSSM(), 0.015),
    "block of Mamba": (lambda: fk.torch.Mamba(288), 0.035),
    "block of Mamba-2": (lambda: fk.torch.Mamba2(288, d_state=16, headdim=64), 0.035),
    "feed-forward, gated": (lambda: fk.torch.MLP(288, 192, gated=True), 0.01),
    "torch's own": (lambda: torch.nn.Sequential(torch.nn.Linear(288, 70), torch.nn.ReLU()), 0.015),
}
EACH = pytest.mark.parametrize("name", NETS)


def make(name):
    torch.manual_seed(0)
    return NETS[name][0]()


def frames(batch=2, length=9):
    return torch.randn(batch, length, 288, generator=torch.Generator().manual_seed(1))


def moved(net, x):
    """How far 8 bits move the output, as a share of its root mean square; and that output."""
    expected, out = net(x).detach(), quantize(net, "int8")(x)
    error = (out - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return error.item(), out


@EACH
def test_error(name):
    net, x = make(name), frames()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    error, out = moved(net, x)
    assert 0 < error < NETS[name][1]
    assert not out.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_error_of_more_layers():
    torch.manual_seed(0)
    assert 0 < moved(backbones.Jamba(), frames())[0] < 0.015


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_rounding(activation):
    """Weights by row and activations by token, both to the nearest of 127 steps each way."""
    torch.manual_seed(0)
    layer = fk.torch.Linear(96, 40)
    layer.weight.data[3] = 0
    x = torch.randn(5, 7, 96)
    x[1, 2] = 0
    layer8 = quantize(layer)

    def rounded(t):
        scale = t.abs().amax(-1, keepdim=True) / 127
        return (t / scale.where(scale > 0, 1)).round() * scale

    expected = F.linear(rounded(x.double()), rounded(layer.weight.double()), layer.bias.double())
    if activation:
        expected = F.gelu(expected, approximate="tanh")
    residual = torch.randn(5, 7, 40)
    torch.testing.assert_close(layer8(x, activation).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer8(x, activation, residual), layer8(x, activation) + residual)
    assert torch.equal(layer8.rows(x, 10, 30), layer8(x)[..., 10:30])
    assert torch.equal(layer8.weight * layer8.scale[:, None], rounded(layer.weight.data).float())


@EACH
def test_as_a_module(name):
    quantized, x = quantize(make(name)), frames()
    expected = quantized(x)
    assert torch.equal(copy.deepcopy(quantized)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), expected)
    torch.manual_seed(1)
    other = quantize(NETS[name][0]())
    assert not torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))  # after a call has packed the weights
    assert torch.equal(other(x), expected)


@EACH
def test_compiled_and_exported(name):
    quantized, x = quantize(make(name)), frames()
    expected = quantized(x)
    torch.compiler.reset()
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    file = io.BytesIO()
    torch.export.save(torch.export.export(quantized, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), expected)


@pytest.mark.parametrize("name", [n for n in NETS if hasattr(backbones, n)])
def test_steps_equal_the_forward(name):
    quantized, x = quantize(make(name)), frames()
    state, out = quantized.init_state(2), []
    for frame in x.unbind(1):
        y, state = quantized.step(frame, state)
        out.append(y)
    torch.testing.assert_close(
        torch.stack(out, 1), quantized(x, all_frames=True), rtol=1e-2, atol=1e-2
    )


def test_what_is_quantized():
    net = quantize(backbones.Mamba())
    kinds = {n: t.dtype for n, t in net.state_dict().items()}
    int8 = {n for n, dtype in kinds.items() if dtype == torch.int8}
    layers = ("in_proj", "x_proj", "out_proj")
    assert int8 == {"embed.weight"} | {
        f"blocks.{i}.mixer.{layer}.weight" for i in range(2) for layer in layers
    }
    assert kinds["embed.scale"] == torch.float32
    half = net.to(torch.bfloat16)
    assert half.embed.scale.dtype == torch.float32  # or the weights would be others
    assert half(frames().to(torch.bfloat16)).dtype == torch.bfloat16
    with torch.inference_mode():
        made_inside = quantize(torch.nn.Linear(64, 8))
        assert made_inside(torch.ones(2, 64)).shape == (2, 8)


def test_threads_share_a_module():
    from concurrent.futures import ThreadPoolExecutor

    quantized, x = quantize(backbones.MLP()), frames()
    expected = quantized(x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(quantized, [x] * 16))
    assert all(torch.equal(r, expected) for r in results)


def test_errors():
    layer = torch.nn.Linear(64, 8)
    with pytest.raises(fk.Error, match="quantize: dtype: expected 'int8', got 'int4'"):
        quantize(layer, "int4")
    with pytest.raises(fk.Error, match="expected linear layers of 64 inputs or more, found none"):
        quantize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    with pytest.raises(fk.Error, match="quantize: module: expected weights on the CPU .* got them"):
        quantize(torch.nn.Linear(64, 8, device="meta"))
    with pytest.raises(fk.Error, match="int8 linear: weight: expected weights on the CPU"):
        quantize(layer).to("meta")(torch.ones(1, 64, device="meta"))
    with pytest.raises(fk.Error, match="expected a tensor that requires no gradient"):
        quantize(layer)(torch.ones(1, 64, requires_grad=True))
    layer.weight.data[0, 0] = torch.inf
    with pytest.raises(fk.Error, match="quantize: 0.weight: expected finite numbers"):
        quantize(torch.nn.Sequential(layer))

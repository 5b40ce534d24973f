"""The backbones: beside the same networks in torch's ops, by window and by frame, as modules."""

import copy
import pickle

import pytest
import torch

import flashkernel as fk
from flashkernel.bench.agent_in_torch import PlainBackbone
from flashkernel.torch import backbones

SMALL = {"input_size": 20, "hidden": 16}
HEADS = {"heads": 2, "head_dim": 8, "window": 5}
NETS = {
    "MLP": (backbones.MLP, {}),
    "Mamba": (backbones.Mamba, {"d_state": 4}),
    "Attention": (backbones.Attention, HEADS),
    "Attention, qk_norm": (backbones.Attention, {**HEADS, "qk_norm": True, "layers": 1}),
    "LSTM": (backbones.LSTM, {}),
    "GRU": (backbones.GRU, {"norm": "layer"}),
    "Jamba": (backbones.Jamba, {**HEADS, "d_state": 4, "layers": 4}),
    "GatedSSM": (backbones.GatedSSM, {"d_state": 4, "d_conv": 3}),
}
EACH = pytest.mark.parametrize("name", NETS)


def make(name, **options):
    cls, own = NETS[name]
    torch.manual_seed(0)
    net = cls(**SMALL, **own, **options)
    with torch.no_grad():
        for p in net.parameters():  # norms and biases too
            p += 0.1 * torch.randn_like(p)
    return net


def frames(batch=3, length=13):
    return torch.randn(batch, length, 20, generator=torch.Generator().manual_seed(1))


def steps(step, state, x):
    """The outputs of frame after frame (B, L, hidden), and the state behind them."""
    out = []
    for frame in x.unbind(1):
        y, state = step(frame, state)
        out.append(y)
    return torch.stack(out, 1), state


@EACH
def test_beside_torchs_ops(name):
    """All frames and gradients, each against the plain network in float64."""
    net, x = make(name), frames()
    weights = torch.linspace(-1, 1, 16)

    def run(function, x):
        out = function(x)
        parameters = list(net.parameters())
        gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), [x, *parameters])
        return [out, *gradients]

    ours = run(lambda x: net(x, all_frames=True), x.clone().requires_grad_())
    torchs = run(PlainBackbone(net), x.clone().requires_grad_())
    net.double()
    exact = run(PlainBackbone(net), x.double().requires_grad_())
    for i, (a, b, e) in enumerate(zip(ours, torchs, exact, strict=True)):
        assert a.shape == e.shape
        mine, other = ((t.double() - e).abs().max() for t in (a, b))
        assert mine <= (2 if i == 0 else 3) * other + 1e-6 * e.abs().max().clamp(min=1)


@EACH
def test_the_last_frame_is_that_of_all(name):
    net, x = make(name), frames(length=20)
    whole = net(x, all_frames=True)
    assert whole.shape == (3, 20, 16)
    for length in (1, 2, 7, 20):
        torch.testing.assert_close(net(x[:, :length]), whole[:, length - 1], rtol=1e-4, atol=1e-5)
    if net.context is not None:  # what is older does not reach it
        old = x.clone()
        old[:, : -net.context] = torch.nan
        assert torch.equal(net(old), net(x[:, -net.context :]))


@EACH
def test_gradients_of_the_last_frame(name):
    """They are those of the last row of all frames."""
    net, x = make(name), frames()
    parameters = list(net.parameters())
    alone = torch.autograd.grad(net(x).square().sum(), parameters)
    whole = torch.autograd.grad(net(x, all_frames=True)[:, -1].square().sum(), parameters)
    for a, b in zip(alone, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@EACH
def test_gradients_by_finite_differences(name):
    net, x = make(name), frames(2, 7)
    parameters = list(net.parameters())
    target = torch.randn(2, 16)
    gradients = torch.autograd.grad((net(x) * target).sum(), parameters)
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    h, values = 2e-3, []
    with torch.no_grad():
        for sign in (1, -2, 1):  # ahead, behind, back
            for p, d in zip(parameters, directions, strict=True):
                p += sign * h * d
            values.append((net(x).double() * target).sum())
    assert slope == pytest.approx((values[0] - values[1]).item() / (2 * h), rel=2e-2, abs=2e-2)


@EACH
def test_steps_equal_the_forward(name):
    """For longer than windows and what is kept of them, in a memory that does not grow."""
    net, x = make(name), frames(length=40)
    expected = net(x, all_frames=True).detach()

    def size(state):
        if isinstance(state, torch.Tensor):
            return state.numel()
        return sum(map(size, state)) if isinstance(state, (list, tuple)) else 0

    first = net.init_state(3)
    begin = size(first)
    out, state = steps(net.step, first, x)
    assert not out.requires_grad and size(state) == begin
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    again, _ = steps(net.step, net.init_state(3), x)
    assert torch.equal(again, out)


@EACH
def test_a_state_can_be_copied(name):
    net, x = make(name), frames(length=12)
    _, state = steps(net.step, net.init_state(3), x[:, :8])
    kept = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    one, _ = steps(net.step, state, x[:, 8:])
    other, _ = steps(net.step, kept, x[:, 8:])
    assert torch.equal(one, other)


@EACH
def test_as_a_module(name):
    net, x = make(name), frames()
    expected = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), expected)
    other = NETS[name][0](**SMALL, **NETS[name][1])
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), expected)
    assert set(net.state_dict()) == {n for n, _ in net.named_parameters()}
    assert net(x[:0]).shape == (0, 16)
    assert net(x[:, :0], all_frames=True).shape == (3, 0, 16)
    assert net(x.transpose(0, 1).contiguous().transpose(0, 1)).equal(expected)


@EACH
def test_compiled(name):
    net, x = make(name), frames(2, 12)
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    results = []
    for function in (net, compiled):
        y = function(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), net.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    step = torch.compile(net.step, fullgraph=True, backend="aot_eager")
    out, _ = steps(step, net.init_state(2), x)
    torch.testing.assert_close(out, steps(net.step, net.init_state(2), x)[0])


@EACH
def test_exported(name):
    """For any length, which reaches no further back than it must as numbers alone."""
    net, x = make(name), frames(2, 12)
    length = torch.export.Dim("length", min=2, max=2000)
    program = torch.export.export(net, (x,), dynamic_shapes=({1: length},)).module()
    for t in (3, 12):
        torch.testing.assert_close(program(x[:, :t]), net(x[:, :t]), rtol=1e-4, atol=1e-5)
    program = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(program(x), net(x))


@EACH
def test_half_precision(name):
    net, x = make(name), frames()
    expected = net(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
        stepped, _ = steps(net.step, net.init_state(3), x)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    net.to(torch.bfloat16)
    x = x.to(torch.bfloat16)
    own, own_steps = net(x), steps(net.step, net.init_state(3), x)[0]
    for result in (out, stepped[:, -1], own, own_steps[:, -1]):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), expected, rtol=0.1, atol=0.1)


@EACH
def test_trains(name):
    net, x = make(name), frames(8, 6)
    target = torch.randn(8, 16)
    optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = (net(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_sizes_by_default():
    """Those of the published networks."""
    nets = {n: getattr(backbones, n)() for n in ("MLP", "Mamba", "Attention", "LSTM", "GRU")}
    nets |= {n: getattr(backbones, n)() for n in ("Jamba", "GatedSSM")}
    for net in nets.values():
        assert (net.input_size, net.hidden) == (288, 256)
        assert net(torch.randn(1, 3, 288)).shape == (1, 256)
    layers = {n: [type(b).__name__ for b in net.blocks] for n, net in nets.items()}
    mamba, attention = ["MambaBlock"], ["AttentionBlock", "FeedForward"]
    assert layers["Jamba"] == 2 * (2 * mamba + attention)
    assert layers["Attention"] == 2 * attention and layers["Mamba"] == 2 * mamba
    mixer = nets["Mamba"].blocks[0].mixer
    assert (mixer.d_inner, mixer.d_state, mixer.d_conv) == (512, 16, 4)
    block = nets["Attention"].blocks[0]
    assert (block.heads, block.head_dim, block.window) == (4, 64, 60)
    assert nets["Attention"].blocks[1].mixer.up.weight.shape == (1024, 256)
    assert [nets[n].context for n in nets] == [1, None, 119, None, None, None, 7]
    assert all("Published baseline" in type(net).__doc__ for net in nets.values())


def test_attention_over_more_frames_than_its_tables_have():
    net = make("Attention", layers=1)
    x = frames(1, 1030)
    whole = net(x, all_frames=True)
    torch.testing.assert_close(whole[:, -1], net(x), rtol=1e-4, atol=1e-5)
    block = net.to(torch.bfloat16).blocks[0]
    assert block.cos.dtype == torch.float32
    assert net.to("meta").blocks[0].cos.device.type == "meta"


def test_the_window_moves_to_the_front():
    """A window of one frame, and one that fills what is kept exactly."""
    for window in (1, 2, 8):
        torch.manual_seed(0)
        net = backbones.Attention(**SMALL, layers=1, heads=1, head_dim=8, window=window)
        x = frames(1, 3 * window + 2)
        out, _ = steps(net.step, net.init_state(1), x)
        torch.testing.assert_close(out, net(x, all_frames=True).detach(), rtol=1e-4, atol=1e-5)


def test_errors():
    net = make("GRU")
    with pytest.raises(fk.Error, match=r"GRU: x: expected shape \(B, L, 20\), got \(3, 20\)"):
        net(torch.randn(3, 20))
    with pytest.raises(fk.Error, match=r"GRU: x: expected shape \(B, L, 20\), got \(3, 5, 21\)"):
        net(torch.randn(3, 5, 21))
    with pytest.raises(fk.Error, match="with L from 1, got"):
        net(torch.randn(3, 0, 20))
    with pytest.raises(fk.Error, match=r"GRU: step: x: expected shape \(B, 20\), got \(3, 1, 20\)"):
        net.step(torch.randn(3, 1, 20), net.init_state(3))
    with pytest.raises(fk.Error, match="MLP: norm: expected 'rms' or 'layer', got 'batch'"):
        backbones.MLP(norm="batch")
    with pytest.raises(fk.Error, match="Attention: window: expected 1 or more frames, got 0"):
        backbones.Attention(window=0)
    with pytest.raises(fk.Error, match="Attention: head_dim: expected an even number, got 7"):
        backbones.Attention(head_dim=7)

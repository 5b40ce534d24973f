"""The backbones in JAX: beside the torch modules with the same weights, and as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flashkernel as fk
import flashkernel.jax
import flashkernel.torch

SMALL = {"input_size": 20, "hidden": 16}
HEADS = {"heads": 2, "head_dim": 8, "window": 5}
NETS = {
    "MLP": {},
    "Mamba": {"d_state": 4},
    "Attention": {**HEADS, "qk_norm": True, "layers": 1},
    "LSTM": {},
    "GRU": {"norm": "layer"},
    "Jamba": {**HEADS, "d_state": 4, "layers": 4},
    "GatedSSM": {"d_state": 4, "d_conv": 3},
}
EACH = pytest.mark.parametrize("name", NETS)


def both(name):
    """The torch module, the net in JAX, and its parameters: those of the module."""
    torch.manual_seed(0)
    module = getattr(fk.torch.backbones, name)(**SMALL, **NETS[name])
    with torch.no_grad():
        for p in module.parameters():  # norms and biases too
            p += 0.1 * torch.randn_like(p)
    net = getattr(fk.jax.backbones, name)(**SMALL, **NETS[name])
    return module, net, net.from_torch(module)


def frames(batch=3, length=13):
    return np.random.default_rng(1).standard_normal((batch, length, 20), np.float32)


@EACH
def test_as_the_torch_module(name):
    """All frames, the last one, and the gradients of both, of parameters and frames."""
    module, net, params = both(name)
    x = frames()
    weights = np.linspace(-1, 1, 16, dtype=np.float32)
    for all_frames in (True, False):

        def loss(params, x, net=net, all_frames=all_frames):
            out = net.forward(params, x, all_frames)
            return (out * weights).sum(), out

        (gradients, dx), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
        x_torch = torch.tensor(x, requires_grad=True)
        expected = module(x_torch, all_frames=all_frames)
        module.zero_grad()
        (expected * torch.tensor(weights)).sum().backward()
        np.testing.assert_allclose(out, expected.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dx, x_torch.grad, rtol=1e-3, atol=1e-4)
        for key, parameter in module.named_parameters():
            np.testing.assert_allclose(
                gradients[key], parameter.grad, rtol=1e-3, atol=2e-4, err_msg=key
            )


@EACH
def test_scan_over_frames(name):
    """Steps under lax.scan give what the window gives, for longer than windows reach."""
    _, net, params = both(name)
    x = frames(length=30)

    @jax.jit
    def run(params, x):
        def step(state, frame):
            out, state = net.step(params, frame, state)
            return state, out

        _, out = jax.lax.scan(step, net.init_state(x.shape[0]), x.swapaxes(0, 1))
        return out.swapaxes(0, 1)

    expected = jax.jit(net.forward, static_argnums=2)(params, x, True)
    np.testing.assert_allclose(run(params, x), expected, rtol=1e-4, atol=1e-5)


@EACH
def test_begins_as_the_torch_module_does(name):
    """Names and shapes of a state_dict, and numbers as large."""
    module, net, _ = both(name)
    params = net.init(jax.random.key(3), jnp.bfloat16)
    fresh = getattr(fk.torch.backbones, name)(**SMALL, **NETS[name], dtype=torch.bfloat16)
    state = fresh.state_dict()
    assert params.keys() == state.keys()
    for key, value in params.items():
        assert value.shape == tuple(state[key].shape), key
        assert str(value.dtype) == str(state[key].dtype).removeprefix("torch."), key
        if value.size >= 100:
            own, other = np.abs(np.float32(value)).mean(), state[key].float().abs().mean().item()
            assert 0.7 * other <= own <= 1.4 * other, key
    out = net.forward(params, jnp.asarray(frames(), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16 and bool(jnp.isfinite(out).all())


def test_bfloat16_goes_over_bit_by_bit():
    module = fk.torch.backbones.GRU(**SMALL, dtype=torch.bfloat16)
    net = fk.jax.backbones.GRU(**SMALL)
    params = net.from_torch(module.state_dict())
    for key, value in module.state_dict().items():
        assert params[key].dtype == jnp.bfloat16
        assert np.array_equal(np.float32(params[key]), value.float().numpy())


def test_nets_are_arguments_of_jit():
    net = fk.jax.backbones.Jamba(**SMALL, **NETS["Jamba"])
    assert hash(net) == hash(fk.jax.backbones.Jamba(**SMALL, **NETS["Jamba"]))
    out = jax.jit(lambda net, p, x: net.forward(p, x), static_argnums=0)(
        net, net.init(jax.random.key(0)), frames()
    )
    assert out.shape == (3, 16)
    assert fk.jax.backbones.Jamba().layers == 6
    assert fk.jax.backbones.Mamba(**SMALL).context is None
    assert fk.jax.backbones.GatedSSM(**SMALL).context == 7


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda n, p, x: n.forward(p, x[..., :3]), r"MLP: x: expected shape \(B, L, 20\), got"),
        (lambda n, p, x: n.forward(p, x[:, :0]), r"MLP: x: expected shape .* with L from 1, got"),
        (lambda n, p, x: n.step(p, x, []), r"MLP: step: x: expected shape \(B, 20\), got"),
        (lambda n, p, x: type(n)(norm="l2"), r"MLP: norm: expected 'rms' or 'layer', got 'l2'"),
        (lambda n, p, x: n.from_torch({}), r"MLP: from_torch: .*: expected a parameter"),
        (
            lambda n, p, x: n.from_torch(fk.torch.backbones.MLP(20, 8)),
            r"MLP: from_torch: embed.weight: expected shape \(16, 20\), got \(8, 20\)",
        ),
        (
            lambda n, p, x: fk.jax.backbones.Attention(window=0).blocks,
            "Attention: window: expected 1 or more frames, got 0",
        ),
        (
            lambda n, p, x: fk.jax.backbones.Attention(head_dim=3).blocks,
            "Attention: head_dim: expected an even number, got 3",
        ),
    ],
)
def test_errors(call, message):
    net = fk.jax.backbones.MLP(**SMALL)
    with pytest.raises(fk.Error, match=message):
        call(net, net.init(jax.random.key(0)), jnp.asarray(frames()))

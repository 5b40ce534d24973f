"""The backbones on NumPy arrays: their definition in plain NumPy, which the torch modules and the
functions of JAX are held to, and the same through the ops."""

import numpy as np
import pytest

import flashkernel as fk
from flashkernel.backbones import NAMES, Backbone, definition, parameters

SIZES = {"input_size": 20, "hidden": 16}
HEADS = {"heads": 2, "head_dim": 8}
# What a module is made with, and what its parameters do not tell.
NETS = {
    "MLP": ({}, {}),
    "Mamba": ({"d_state": 4}, {}),
    "Attention": ({**HEADS, "window": 5, "layers": 1}, {"heads": 2, "window": 5}),
    "Attention, qk_norm": (
        {**HEADS, "window": 5, "qk_norm": True, "eps": 1e-3},
        {"heads": 2, "window": 5, "eps": 1e-3},
    ),
    "LSTM": ({}, {}),
    "GRU": ({"norm": "layer"}, {}),
    "Jamba": ({**HEADS, "window": 5, "d_state": 4, "layers": 4}, {"heads": 2, "window": 5}),
    "GatedSSM": ({"d_state": 4, "d_conv": 3}, {}),
}
EACH = pytest.mark.parametrize("name", NETS)


def class_name(name):
    return name.partition(",")[0]


def trained(name):
    """A torch module whose parameters are all random, and these as arrays."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = getattr(fk.torch.backbones, class_name(name))(**SIZES, **NETS[name][0])
    with torch.no_grad():
        for p in module.parameters():  # norms and biases too
            p += 0.1 * torch.randn_like(p)
    return module, {k: v.numpy() for k, v in module.state_dict().items()}


def frames(length=13, batch=3):
    return np.random.default_rng(1).standard_normal((batch, length, 20), np.float32)


def exact(name, params, x):
    """Every frame's output by the definition, in float64."""
    params = {k: v.astype(np.float64) for k, v in params.items()}
    net = Backbone(params, ops=definition, **NETS[name][1])
    out = net.forward(x.astype(np.float64), all_frames=True)
    assert out.dtype == np.float64
    return out


@EACH
def test_the_torch_module_is_as_defined(name):
    """In float64 too, in torch's own ops, where both differ by roundings alone."""
    import torch

    from flashkernel.bench.agent_in_torch import PlainBackbone

    module, params = trained(name)
    expected = exact(name, params, frames())
    x = torch.from_numpy(frames())
    with torch.no_grad():
        np.testing.assert_allclose(module(x, all_frames=True), expected, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(module(x), expected[:, -1], rtol=1e-4, atol=2e-5)
        plain = PlainBackbone(module.double())(x.double())
    np.testing.assert_allclose(plain, expected, rtol=1e-6, atol=1e-7)


@EACH
def test_the_functions_of_jax_are_as_defined(name):
    jax = pytest.importorskip("jax")
    module, params = trained(name)
    net = getattr(fk.jax.backbones, class_name(name))(**SIZES, **NETS[name][0])
    out = jax.jit(net.forward, static_argnums=2)(net.from_torch(module), frames(), True)
    np.testing.assert_allclose(out, exact(name, params, frames()), rtol=1e-4, atol=2e-5)


@EACH
def test_the_ops_on_arrays(name):
    """By window and by frame, for longer than windows reach."""
    _, params = trained(name)
    x = frames(23)
    expected = exact(name, params, x)
    net = Backbone(params, **NETS[name][1])
    whole = net.forward(x, all_frames=True)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=2e-5)
    for length in (1, 2, 7, 23):
        out = net.forward(x[:, :length])
        np.testing.assert_allclose(out, expected[:, length - 1], rtol=1e-4, atol=2e-5)
    if net.context is not None:  # what is older does not reach it
        old = x.copy()
        old[:, : -net.context] = np.nan
        assert np.array_equal(net.forward(old), net.forward(x[:, -net.context :]))
    state = net.init_state(3)
    for t in range(x.shape[1]):
        out, state = net.step(x[:, t], state)
        np.testing.assert_allclose(out, expected[:, t], rtol=1e-4, atol=2e-5)


@EACH
def test_steps_of_the_definition(name):
    _, params = trained(name)
    params = {k: v.astype(np.float64) for k, v in params.items()}
    net = Backbone(params, ops=definition, **NETS[name][1])
    x = frames().astype(np.float64)
    expected, state = net.forward(x, all_frames=True), net.init_state(3)
    for t in range(x.shape[1]):
        out, state = net.step(x[:, t], state)
        np.testing.assert_allclose(out, expected[:, t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_random_parameters(name, tmp_path):
    """They have the names and shapes of a module's, and survive a file."""
    options = {"d_state": 4} if name in ("Mamba", "Jamba", "GatedSSM") else {}
    options |= HEADS if name in ("Attention", "Jamba") else {}
    params = parameters(name, np.random.default_rng(0), **SIZES, **options)
    np.savez(tmp_path / "agent.npz", **params)
    more = {"heads": 2} if name in ("Attention", "Jamba") else {}
    with np.load(tmp_path / "agent.npz") as kept:
        out = Backbone(kept, **more).forward(frames())
    assert out.shape == (3, 16) and np.isfinite(out).all()
    assert np.array_equal(out, Backbone(params, **more).forward(frames()))
    pytest.importorskip("torch")
    state = getattr(fk.torch.backbones, name)(**SIZES, **options).state_dict()
    assert {k: v.shape for k, v in params.items()} == {k: tuple(v.shape) for k, v in state.items()}


def test_errors():
    params = parameters("GRU", np.random.default_rng(0), **SIZES)
    net = Backbone(params)
    with pytest.raises(fk.Error, match=r"Backbone: x: expected shape \(B, L, 20\) .*, got \(3, 20"):
        net.forward(frames()[:, 0])
    with pytest.raises(fk.Error, match="with L from 1, got"):
        net.forward(frames()[:, :0])
    with pytest.raises(fk.Error, match=r"Backbone: step: x: expected shape \(B, 20\), got"):
        net.step(frames(), net.init_state(3))
    with pytest.raises(fk.Error, match="params: expected norms.2.weight among them, found none"):
        Backbone({k: v for k, v in params.items() if k != "norms.2.weight"})
    with pytest.raises(fk.Error, match="params: expected embed.weight among them, found none"):
        Backbone({})
    with pytest.raises(fk.Error, match="params: blocks.0: expected the parameters .*, got weight"):
        Backbone({"embed.weight": np.ones((2, 2)), "blocks.0.weight": np.ones(2)})
    with pytest.raises(fk.Error, match="Backbone: heads: expected a divisor of 256, got 3"):
        Backbone(parameters("Attention", np.random.default_rng(0), **SIZES), heads=3)
    with pytest.raises(fk.Error, match="parameters: name: expected one of MLP, .*, got 'RNN'"):
        parameters("RNN", np.random.default_rng(0))

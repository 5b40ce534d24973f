"""The backbones of `flashkernel.torch.backbones` as plain functions, with parameters in a
dictionary.

    net = flashkernel.jax.backbones.Mamba()
    params = net.init(jax.random.key(0))  # or, for the same answers, net.from_torch(module)
    out = net.forward(params, window)  # (B, L, 288) -> (B, 256), the last frame's
    state = net.init_state(1)
    out, state = net.step(params, frame, state)  # (1, 288) -> (1, 256)

A net is a description, hashable and without arrays; what it computes follows from its arguments
alone, so `jit`, `grad`, `vmap` and `lax.scan` over frames take its methods as they are."""

from .backbone import Backbone
from .nets import GRU, LSTM, MLP, Attention, GatedSSM, Jamba, Mamba

__all__ = ["GRU", "LSTM", "MLP", "Attention", "Backbone", "GatedSSM", "Jamba", "Mamba"]

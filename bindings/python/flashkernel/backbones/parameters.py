"""Random parameters of each backbone, to try or to time one without a trained module."""

import math

import numpy as np

import flashkernel as fk

NAMES = ("MLP", "GatedSSM", "GRU", "LSTM", "Mamba", "Attention", "Jamba")


def parameters(
    name,
    rng,
    *,
    input_size=288,
    hidden=256,
    layers=None,
    d_state=16,
    d_conv=4,
    expand=2,
    heads=4,
    head_dim=64,
    feed_forward=4,
) -> dict:
    """Those of `flashkernel.torch.backbones`' class of this name with these options, float32, drawn
    from `rng` (numpy.random.default_rng()): numbers as large as a module begins with."""
    if name not in NAMES:
        raise fk.Error(f"parameters: name: expected one of {', '.join(NAMES)}, got {name!r}")
    inner, rank = expand * hidden, math.ceil(hidden / 16)

    def uniform(*shape):
        bound = np.float32(math.prod(shape[1:]) ** -0.5)
        return (2 * rng.random(shape, np.float32) - 1) * bound

    def feed(width):
        return {
            "mixer.up.weight": uniform(width, hidden),
            "mixer.down.weight": uniform(hidden, width),
        }

    def attention():
        width = heads * head_dim
        return {"qkv.weight": uniform(3 * width, hidden), "out_proj.weight": uniform(hidden, width)}

    def convolving(prefix, selected):
        return {
            f"{prefix}in_proj.weight": uniform(2 * inner, hidden),
            f"{prefix}conv1d.weight": uniform(inner, 1, d_conv),
            f"{prefix}conv1d.bias": np.zeros(inner, np.float32),
            f"{prefix}x_proj.weight": uniform(selected, inner),
            f"{prefix}out_proj.weight": uniform(hidden, inner),
        }

    def mamba():
        states = np.arange(1, d_state + 1, dtype=np.float32)
        return convolving("mixer.", rank + 2 * d_state) | {
            "mixer.dt_proj.weight": uniform(inner, rank),
            # softplus(bias) is from 0.001 to 0.1.
            "mixer.dt_proj.bias": rng.uniform(-6.9, -2.25, inner).astype(np.float32),
            "mixer.A_log": np.tile(np.log(states), (inner, 1)),
            "mixer.D": np.ones(inner, np.float32),
        }

    def gated():
        return convolving("", 1 + 2 * d_state) | {
            "x_proj.bias": np.zeros(1 + 2 * d_state, np.float32)
        }

    def recurrent(gates):
        rows = gates * hidden
        return {
            "mixer.weight_ih_l0": uniform(rows, hidden),
            "mixer.weight_hh_l0": uniform(rows, hidden),
            "mixer.bias_ih_l0": np.zeros(rows, np.float32),
            "mixer.bias_hh_l0": np.zeros(rows, np.float32),
        }

    def attending():
        return [attention(), feed(feed_forward * hidden)]

    layer = {
        "MLP": lambda i: [feed(inner)],
        "GatedSSM": lambda i: [gated()],
        "GRU": lambda i: [recurrent(3)],
        "LSTM": lambda i: [recurrent(4)],
        "Mamba": lambda i: [mamba()],
        "Attention": lambda i: attending(),
        "Jamba": lambda i: attending() if i % 3 == 2 else [mamba()],
    }[name]
    if layers is None:
        layers = 6 if name == "Jamba" else 2
    blocks = [block for i in range(layers) for block in layer(i)]
    params = {
        "embed.weight": uniform(hidden, input_size),
        "embed.bias": np.zeros(hidden, np.float32),
    }
    for i in range(len(blocks) + 1):
        params[f"norms.{i}.weight"] = np.ones(hidden, np.float32)
    for i, block in enumerate(blocks):
        params |= {f"blocks.{i}.{key}": value for key, value in block.items()}
    return params

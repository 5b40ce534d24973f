"""A game agent's backbone, forward or a whole training step (forward, backward, AdamW): layers of
Mamba, hidden 256, inner 512, state 16, convolution 4. In JAX: our ops under jit beside the same
model in plain JAX, whose scan is the one thing that can be written in more than one way."""

import numpy as np

from .mamba import associative_states, scan_outputs
from .workloads import Workload

_HIDDEN, _INNER, _STATE, _WIDTH, _RANK, _LAYERS = 256, 512, 16, 4, 16, 2


def _inputs(params, rng):
    b, length = params["B"], params["L"]

    def weight(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    out = {"x": rng.standard_normal((b, length, _HIDDEN), np.float32)}
    if params.get("train"):
        out["target"] = rng.standard_normal((b, length, _HIDDEN), np.float32)
    for i in range(_LAYERS):
        layer = {
            "norm": np.ones(_HIDDEN, np.float32),
            "in_proj": weight(2 * _INNER, _HIDDEN),
            "conv_weight": weight(_INNER, _WIDTH),
            "conv_bias": np.zeros(_INNER, np.float32),
            "x_proj": weight(_RANK + 2 * _STATE, _INNER),
            "dt_proj": weight(_INNER, _RANK),
            "dt_bias": np.full(_INNER, -4.0, np.float32),
            "A_log": np.log(np.tile(np.arange(1, _STATE + 1, dtype=np.float32), (_INNER, 1))),
            "D": np.ones(_INNER, np.float32),
            "out_proj": weight(_HIDDEN, _INNER),
        }
        out |= {f"layer{i}_{k}": v for k, v in layer.items()}
    return out


def _model(m, weights, x, norm, conv, scan):
    for i in range(_LAYERS):
        w = {k.partition("_")[2]: v for k, v in weights.items() if k.startswith(f"layer{i}_")}
        u, z = m.split(norm(x, w["norm"]) @ w["in_proj"].T, 2, -1)
        u = conv(u, w["conv_weight"], w["conv_bias"])
        dt, b, c = m.split(u @ w["x_proj"].T, [_RANK, _RANK + _STATE], -1)
        arguments = (dt @ w["dt_proj"].T, -m.exp(w["A_log"]), b, c, w["D"], z, w["dt_bias"])
        x = x + scan(u, *arguments) @ w["out_proj"].T
    return x


def _with_ours(fk, weights, x):
    import jax.numpy as m

    return _model(
        m, weights, x,
        lambda x, w: fk.rms_norm(x, w),
        lambda x, w, b: fk.causal_conv1d(x, w, b, activation="silu"),
        lambda u, dt, A, B, C, D, z, bias: fk.selective_scan(
            u, dt, A, B, C, D, z=z, delta_bias=bias, delta_softplus=True
        ),
    )  # fmt: skip


def _in_plain_jax(states):
    def model(m, weights, x):
        import jax

        def norm(x, w):
            return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w

        def conv(x, w, b):
            padded = m.pad(x, ((0, 0), (_WIDTH - 1, 0), (0, 0)))
            length = x.shape[1]
            return jax.nn.silu(sum(w[:, k] * padded[:, k : k + length] for k in range(_WIDTH)) + b)

        def scan(u, dt, A, B, C, D, z, bias):
            t = {"u": u, "delta": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": bias}
            return states(jax, t)

        return _model(m, weights, x, norm, conv, scan)

    return model


def _call(params, model):
    """The forward, or one step of training: what it returns is the new weights."""

    def forward(m, t):
        weights = {k: v for k, v in t.items() if k.startswith("layer")}
        return model(m, weights, t["x"])

    def train(m, t):
        import jax
        import jax.numpy as jnp

        weights = {k: v for k, v in t.items() if k.startswith("layer")}

        def loss(weights):
            return jnp.square(model(m, weights, t["x"]) - t["target"]).mean()

        rate, decay, beta1, beta2, eps = 1e-3, 1e-2, 0.9, 0.999, 1e-8
        new = {}
        for k, g in jax.grad(loss)(weights).items():
            # From moments of 0.1 times the weights, so that they are read as well.
            first = beta1 * 0.1 * weights[k] + (1 - beta1) * g
            second = beta2 * 0.1 * jnp.square(weights[k]) + (1 - beta2) * g * g
            step = first / (jnp.sqrt(second) + eps)
            new[k] = (weights[k] * (1 - rate * decay) - rate * step, first, second)
        return new

    return train if params.get("train") else forward


WORKLOADS = [
    Workload(
        "mamba_agent",
        _inputs,
        lambda params: _call(params, _with_ours),
        {
            "jax_lax_scan": lambda params: _call(params, _in_plain_jax(scan_outputs)),
            "jax_associative_scan": lambda params: _call(params, _in_plain_jax(associative_states)),
        },
        {"fwd": 2},
        options=True,
    )
]

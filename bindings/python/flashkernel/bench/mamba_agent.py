"""A game agent's backbone, forward or a whole training step (forward, backward, AdamW): layers of
Mamba, hidden 256, inner 512, state 16, convolution 4. Ours is `fk.torch.MambaStack` and torch's
AdamW, or by `--framework jax` our ops under jit; beside it the same model in plain JAX under jit,
whose scan is the one thing that can be written in more than one way."""

import numpy as np

from . import counts
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
    return out | {"layers_norm": np.ones(_HIDDEN, np.float32)}


def _model(m, weights, x, norm, conv, scan):
    for i in range(_LAYERS):
        w = {k.partition("_")[2]: v for k, v in weights.items() if k.startswith(f"layer{i}_")}
        u, z = m.split(norm(x, w["norm"]) @ w["in_proj"].T, 2, -1)
        u = conv(u, w["conv_weight"], w["conv_bias"])
        dt, b, c = m.split(u @ w["x_proj"].T, [_RANK, _RANK + _STATE], -1)
        arguments = (dt @ w["dt_proj"].T, -m.exp(w["A_log"]), b, c, w["D"], z, w["dt_bias"])
        x = x + scan(u, *arguments) @ w["out_proj"].T
    return norm(x, weights["layers_norm"])


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


# The modules' names for what `_inputs` gives.
_NAMES = {
    "norm": "norm.weight", "in_proj": "mixer.in_proj.weight",
    "conv_weight": "mixer.conv1d.weight", "conv_bias": "mixer.conv1d.bias",
    "x_proj": "mixer.x_proj.weight", "dt_proj": "mixer.dt_proj.weight",
    "dt_bias": "mixer.dt_proj.bias", "A_log": "mixer.A_log", "D": "mixer.D",
    "out_proj": "mixer.out_proj.weight",
}  # fmt: skip


def _torch_model(fk, t):
    x = t["x"]
    model = fk.torch.MambaStack(_HIDDEN, _LAYERS, eps=1e-6, device=x.device, dtype=x.dtype)
    state = {"norm_f.weight": t["layers_norm"]}
    for i in range(_LAYERS):
        state |= {f"layers.{i}.{v}": t[f"layer{i}_{k}"] for k, v in _NAMES.items()}
        conv = f"layers.{i}.mixer.conv1d.weight"
        state[conv] = state[conv][:, None]
    model.load_state_dict(state)
    return model


def _torch_call(params):
    """As `_call`, of torch's tensors; a step of training changes the model's own weights."""
    made = []

    def call(fk, t):
        import torch

        if not made:
            # Products of float32 in TF32 on a GPU, as JAX has them by default.
            torch.backends.cuda.matmul.allow_tf32 = True
            model = _torch_model(fk, t)
            # Capturable: on a GPU the whole step is one graph.
            optimiser = torch.optim.AdamW(
                model.parameters(), 1e-3, fused=True, capturable=t["x"].is_cuda
            )
            made.extend((model, optimiser))
        model, optimiser = made
        if not params.get("train"):
            return model(t["x"])
        with torch.enable_grad():
            loss = torch.nn.functional.mse_loss(model(t["x"]), t["target"])
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        return loss.detach()

    return call


def _ours(params):
    in_torch, in_jax = _torch_call(params), _call(params, _with_ours)

    def call(fk, t):
        return (in_torch if _is_torch(t["x"]) else in_jax)(fk, t)

    return call


def _peer(states):
    """Plain JAX: of JAX's arrays a function to be compiled, of torch's tensors one that is compiled
    here, for the same numbers."""

    def make(params):
        in_jax, made = _call(params, _in_plain_jax(states)), []

        def call(m, t):
            if not _is_torch(t["x"]):
                return in_jax(m, t)
            import jax

            if not made:
                arrays = {k: jax.device_put(v.cpu().numpy()) for k, v in t.items()}
                made.extend((jax.jit(lambda a: in_jax(jax.numpy, a)), arrays))
            out = made[0](made[1])
            return out if t["x"].is_cuda else jax.block_until_ready(out)

        return call

    return make


def _is_torch(x):
    return type(x).__module__.startswith("torch")


WORKLOADS = [
    Workload(
        "mamba_agent",
        _inputs,
        _ours,
        {"jax_lax_scan": _peer(scan_outputs), "jax_associative_scan": _peer(associative_states)},
        counts.mamba_agent((_HIDDEN, _INNER, _STATE, _WIDTH, _RANK), _LAYERS),
        products=True,
        options=True,
        errors=False,
    )
]

"""The workloads of Mamba: the selective scan beside JAX's scans, and its convolution."""

import numpy as np

from . import counts
from .workloads import Workload, normal


def _inputs(params, rng):
    b, length, d, n = (params[k] for k in "BLDN")
    return {
        "u": normal(rng, b, length, d),
        "delta": normal(rng, b, length, d),
        "A": -np.exp(normal(rng, d, n)),
        "B": normal(rng, b, length, n),
        "C": normal(rng, b, length, n),
        "D": normal(rng, d),
        "z": normal(rng, b, length, d),
        "delta_bias": normal(rng, d),
    }


def _ours(params):
    algorithm = params.get("algorithm", "auto")

    def call(fk, t):
        return fk.selective_scan(**t, delta_softplus=True, algorithm=algorithm)

    return call


def _torch(params):
    """The recurrence, a step at a time."""

    def call(m, t):
        dt = m.nn.functional.softplus(t["delta"] + t["delta_bias"])
        state, outputs = 0.0, []
        for i in range(t["u"].shape[1]):
            step, u = dt[:, i, :, None], t["u"][:, i, :, None]
            state = m.exp(step * t["A"]) * state + step * u * t["B"][:, i, None]
            outputs.append((state * t["C"][:, i, None]).sum(-1))
        y = m.stack(outputs, 1) + t["u"] * t["D"]
        return y * m.nn.functional.silu(t["z"])

    return call


def associative_states(jax, t):
    """By jax.lax.associative_scan over (decay, input) pairs."""
    dt = jax.nn.softplus(t["delta"] + t["delta_bias"])
    decay = jax.numpy.exp(dt[..., None] * t["A"])
    inputs = (dt * t["u"])[..., None] * t["B"][:, :, None]

    def combine(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    _, states = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
    y = (states * t["C"][:, :, None]).sum(-1)
    return (y + t["u"] * t["D"]) * jax.nn.silu(t["z"])


def scan_outputs(jax, t):
    """By jax.lax.scan over time; what a step multiplies is made inside, so that no tensor of
    B L D N is ever in memory."""
    dt = jax.nn.softplus(t["delta"] + t["delta_bias"])

    def step(state, x):
        dt, u, b, c = x
        decay = jax.numpy.exp(dt[..., None] * t["A"])
        state = decay * state + (dt * u)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    by_time = tuple(x.swapaxes(0, 1) for x in (dt, t["u"], t["B"], t["C"]))
    first = jax.numpy.zeros((t["u"].shape[0], *t["A"].shape), jax.numpy.float32)
    _, y = jax.lax.scan(step, first, by_time)
    return (y.swapaxes(0, 1) + t["u"] * t["D"]) * jax.nn.silu(t["z"])


def _in_jax(function):
    def make(params):
        def call(m, t):
            import jax

            return function(jax, t)

        return call

    return make


def _conv_inputs(params, rng):
    b, length, d, w = (params[k] for k in "BLDW")
    x = normal(rng, b, length, d)
    if params.get("time_contiguous"):
        x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
    return {
        "x": x,
        "weight": normal(rng, d, w),
        "bias": normal(rng, d),
    }


def _conv_torch(m, t):
    x = t["x"].transpose(1, 2)
    channels, width = t["weight"].shape
    conv = m.nn.functional.conv1d
    y = conv(x, t["weight"][:, None], t["bias"], padding=width - 1, groups=channels)
    return m.nn.functional.silu(y[..., : x.shape[-1]]).transpose(1, 2)


def _step_inputs(params, rng):
    b, d, n = (params[k] for k in "BDN")
    channels = (params["H"], d) if "H" in params else (d,)
    groups = (1,) if "H" in params else ()
    return {
        "state": normal(rng, b, *channels, n),
        "x": normal(rng, b, *channels),
        "dt": normal(rng, b, *channels),
        "A": -np.exp(normal(rng, *channels, n)),
        "B": normal(rng, b, *groups, n),
        "C": normal(rng, b, *groups, n),
        "D": normal(rng, *channels),
        "z": normal(rng, b, *channels),
        "dt_bias": normal(rng, *channels),
    }


def _step_ours(fk, t):
    A = t["A"]
    if A.ndim == 3 and hasattr(A, "expand"):  # one number a head, as Mamba-2 has it
        A = A[:, :1, :1].expand(A.shape)
    return fk.selective_state_update(**{**t, "A": A}, dt_softplus=True)


def _step_torch(m, t):
    dt = m.nn.functional.softplus(t["dt"] + t["dt_bias"])[..., None]
    B, C = (t[k][:, None] for k in "BC")
    state = m.exp(dt * t["A"]) * t["state"] + dt * B * t["x"][..., None]
    y = (state * C).sum(-1) + t["D"] * t["x"]
    return y * m.nn.functional.silu(t["z"]), t["state"].copy_(state)


def _conv_step_inputs(params, rng):
    b, d, w = (params[k] for k in "BDW")
    return {
        "conv_state": normal(rng, b, w - 1, d),
        "x": normal(rng, b, d),
        "weight": normal(rng, d, w),
        "bias": normal(rng, d),
    }


def _conv_step_torch(m, t):
    window = m.cat([t["conv_state"], t["x"][:, None]], 1)
    y = (window * t["weight"].T).sum(1) + t["bias"]
    return m.nn.functional.silu(y), t["conv_state"].copy_(window[:, 1:])


WORKLOADS = [
    Workload(
        "selective_scan",
        _inputs,
        _ours,
        {
            "torch": _torch,
            "jax_associative_scan": _in_jax(associative_states),
            "jax_lax_scan": _in_jax(scan_outputs),
        },
        counts.selective_scan,
        ("u", "delta", "A", "B", "C", "D", "z", "delta_bias"),
        options=True,
        errors=False,
        loops=("torch",),
    ),
    Workload(
        "causal_conv1d",
        _conv_inputs,
        lambda fk, t: fk.causal_conv1d(t["x"], t["weight"], t["bias"], activation="silu"),
        {"torch": _conv_torch},
        counts.causal_conv1d,
        ("x", "weight", "bias"),
    ),
    Workload(
        "selective_state_update",
        _step_inputs,
        _step_ours,
        {"torch": _step_torch},
        counts.selective_state_update,
        errors=False,  # the state moves on with each call
    ),
    Workload(
        "causal_conv1d_update",
        _conv_step_inputs,
        lambda fk, t: fk.causal_conv1d_update(
            t["x"], t["conv_state"], t["weight"], t["bias"], activation="silu"
        ),
        {"torch": _conv_step_torch},
        counts.causal_conv1d_update,
        errors=False,
    ),
]

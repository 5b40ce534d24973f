"""What is measured: for each op its inputs, our call, the peers' calls, and the least bytes it must
move. A workload is written once, against an array namespace, for every framework and device."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Workload:
    """`inputs(params, rng)` gives float32 and integer NumPy arrays; floats are cast to the case's
    dtype, except those in `parameters`, which stay float32 in half precision too if asked. `ours`
    takes (fk, tensors) and each peer (module, tensors), module being torch, jax.numpy or numpy."""

    op: str
    inputs: Callable
    ours: Callable
    peers: dict[str, Callable]
    # Elements of the activations read and written, per direction, as multiples of x's size (plus
    # what does not scale with x left out: weights, row statistics).
    traffic: dict[str, float] = field(default_factory=dict)
    differentiable: tuple = ()


def _rows(params, rng, *names, scale=1.0):
    shape = (params["rows"], params["cols"])
    return {n: rng.standard_normal(shape, np.float32) * np.float32(scale) for n in names}


def _norm_inputs(*vectors):
    def inputs(params, rng):
        out = _rows(params, rng, *(["x", "residual"] if params.get("residual") else ["x"]))
        for name in vectors:
            out[name] = rng.standard_normal(params["cols"], np.float32)
        return out

    return inputs


def _sum_and(norm):
    """A peer's residual add followed by its norm: what one fused call replaces."""

    def call(m, t):
        if "residual" not in t:
            return norm(m, t["x"], t)
        s = t["x"] + t["residual"]
        return norm(m, s, t), s

    return call


def _torch_rms(m, s, t):
    return m.nn.functional.rms_norm(s, (s.shape[-1],), t["weight"], 1e-6)


def _torch_layer(m, s, t):
    return m.nn.functional.layer_norm(s, (s.shape[-1],), t["weight"], t["bias"], 1e-5)


def _plain_rms(m, s, t):
    f = s.astype(m.float32)
    return (f / m.sqrt((f * f).mean(-1, keepdims=True) + 1e-6) * t["weight"]).astype(s.dtype)


def _plain_layer(m, s, t):
    f = s.astype(m.float32)
    f = f - f.mean(-1, keepdims=True)
    y = f / m.sqrt((f * f).mean(-1, keepdims=True) + 1e-5) * t["weight"] + t["bias"]
    return y.astype(s.dtype)


def _plain_logsumexp(m, x):
    top = x.max(-1, keepdims=True)
    return m.log(m.exp(x - top).sum(-1, keepdims=True)) + top


def _plain_cross_entropy(m, t):
    logits = t["logits"].astype(m.float32)
    lse = _plain_logsumexp(m, logits)[:, 0]
    return (lse - logits[m.arange(len(lse)), t["targets"]]).mean()


def _plain(function):
    return {"numpy": function, "jax": function}


def _rope_inputs(params, rng):
    b, length, h, d = (params[k] for k in "BLHD")
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)[None, :]
    return {
        "x": rng.standard_normal((b, length, h, d), np.float32),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
    }


def _rope(m, t):
    x, half = t["x"], t["x"].shape[-1] // 2
    cos, sin = t["cos"][None, :, None], t["sin"][None, :, None]
    a, b = x[..., :half], x[..., half:]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if m.__name__ == "torch":
        return m.cat(parts, -1).to(x.dtype)
    return m.concatenate(parts, -1).astype(x.dtype)


def _cross_entropy_inputs(params, rng):
    logits = _rows(params, rng, "logits", scale=3.0)
    return logits | {"targets": rng.integers(0, params["cols"], params["rows"])}


def _unary(name, ours, torch, plain, traffic):
    return Workload(
        name,
        lambda p, rng: _rows(p, rng, "x", scale=3.0),
        ours,
        {"torch": torch, **_plain(plain)},
        traffic,
        ("x",),
    )


def _norm_call(fk, name, t):
    arguments = {k: t[k] for k in ("weight", "bias", "residual") if k in t}
    return getattr(fk, name)(t["x"], **arguments)


_NORM_TRAFFIC = {"fwd": 2, "fwd_residual": 4, "bwd": 3, "bwd_residual": 4}

WORKLOADS = {
    w.op: w
    for w in [
        Workload(
            "rms_norm",
            _norm_inputs("weight"),
            lambda fk, t: _norm_call(fk, "rms_norm", t),
            {"torch": _sum_and(_torch_rms), **_plain(_sum_and(_plain_rms))},
            _NORM_TRAFFIC,
            ("x", "residual", "weight"),
        ),
        Workload(
            "layer_norm",
            _norm_inputs("weight", "bias"),
            lambda fk, t: _norm_call(fk, "layer_norm", t),
            {"torch": _sum_and(_torch_layer), **_plain(_sum_and(_plain_layer))},
            _NORM_TRAFFIC,
            ("x", "residual", "weight", "bias"),
        ),
        _unary(
            "softmax",
            lambda fk, t: fk.softmax(t["x"]),
            lambda m, t: m.softmax(t["x"], -1),
            lambda m, t: m.exp(t["x"] - _plain_logsumexp(m, t["x"])),
            {"fwd": 2, "bwd": 3},
        ),
        _unary(
            "log_softmax",
            lambda fk, t: fk.log_softmax(t["x"]),
            lambda m, t: m.log_softmax(t["x"], -1),
            lambda m, t: t["x"] - _plain_logsumexp(m, t["x"]),
            {"fwd": 2, "bwd": 3},
        ),
        _unary(
            "logsumexp",
            lambda fk, t: fk.logsumexp(t["x"]),
            lambda m, t: m.logsumexp(t["x"], -1),
            lambda m, t: _plain_logsumexp(m, t["x"])[..., 0],
            {"fwd": 1, "bwd": 2},
        ),
        _unary(
            "sum",
            lambda fk, t: fk.sum(t["x"], -1),
            lambda m, t: m.sum(t["x"], -1),
            lambda m, t: m.sum(t["x"], -1),
            {"fwd": 1, "bwd": 1},
        ),
        _unary(
            "max",
            lambda fk, t: fk.max(t["x"], -1),
            lambda m, t: m.amax(t["x"], -1),
            lambda m, t: m.max(t["x"], -1),
            {"fwd": 1, "bwd": 2},
        ),
        Workload(
            "cross_entropy",
            _cross_entropy_inputs,
            lambda fk, t: fk.cross_entropy(t["logits"], t["targets"]),
            {
                "torch": lambda m, t: m.nn.functional.cross_entropy(t["logits"], t["targets"]),
                **_plain(_plain_cross_entropy),
            },
            {"fwd": 1, "bwd": 2},
            ("logits",),
        ),
        Workload(
            "rope",
            _rope_inputs,
            lambda fk, t: fk.rope(t["x"], t["cos"], t["sin"]),
            {"torch": _rope, **_plain(_rope)},
            {"fwd": 2, "bwd": 2},
            ("x",),
        ),
    ]
}

#: Inputs that stay float32 when the activations are half precision.
PARAMETERS = ("cos", "sin")


def bytes_moved(workload: Workload, direction: str, params: dict, inputs: dict, itemsize: int):
    """The floor: activations each read or written once."""
    key = f"{direction}_residual" if params.get("residual") else direction
    multiple = workload.traffic.get(key, workload.traffic.get(direction, 0))
    return multiple * next(iter(inputs.values())).size * itemsize

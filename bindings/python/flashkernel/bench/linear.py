"""The workloads of fused projections: linear layers and a language model's loss."""

import numpy as np

from . import counts
from .workloads import Workload, normal


def _weight(rng, *shape):
    return normal(rng, *shape) * np.float32(shape[-1] ** -0.5)


def _linear_inputs(params, rng):
    m, k, n = (params[key] for key in "MKN")
    out = {"x": normal(rng, m, k), "weight": _weight(rng, n, k)}
    if params.get("activation"):
        out["bias"] = normal(rng, n)
    return out


def _linear(params):
    activation = params.get("activation")
    return lambda fk, t: fk.linear(**t, activation=activation)


def _torch_linear(params):
    def call(m, t):
        y = m.nn.functional.linear(**t)
        if params.get("activation") == "gelu_tanh":
            y = m.nn.functional.gelu(y, approximate="tanh")
        return y

    return call


def _head_inputs(params, rng):
    n, k, v = (params[key] for key in "NKV")
    targets = rng.integers(0, v, n)
    return {"x": normal(rng, n, k), "weight": _weight(rng, v, k), "targets": targets}


def _torch_head(m, t):
    """The loss from logits in memory."""
    logits = m.nn.functional.linear(t["x"], t["weight"])
    return m.nn.functional.cross_entropy(logits.float(), t["targets"])


def _torch_chunked_head(m, t):
    """Torch's own loss without all logits in memory."""
    functional = m.nn.functional
    options = m.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(t["x"], t["weight"], t["targets"], options=options)


WORKLOADS = [
    Workload(
        "linear",
        _linear_inputs,
        _linear,
        {"torch": _torch_linear},
        counts.linear,
        ("x", "weight", "bias"),
        products=True,
        options=True,
    ),
    Workload(
        "linear_cross_entropy",
        _head_inputs,
        lambda fk, t: fk.linear_cross_entropy(t["x"], t["weight"], t["targets"]),
        {"torch": _torch_head, "chunked": _torch_chunked_head},
        counts.linear_cross_entropy,
        ("x", "weight"),
        products=True,
    ),
]

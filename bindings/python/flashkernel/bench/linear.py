"""The workloads of fused projections: linear layers and a language model's loss."""

import numpy as np

from . import counts
from .linear_cpu import PACKED, linear_inputs, openvino, torch_linear, weight_of
from .workloads import Workload, normal


def _linear(params):
    activation = params.get("activation")
    return lambda fk, t: fk.linear(**t, activation=activation)


def _product(params):
    """The product alone, of a layer that has more."""
    return lambda m, t: m.nn.functional.linear(t["x"], t["weight"])


def _gated_inputs(params, rng):
    m, k, n = (params[key] for key in "MKN")
    weights = {name: weight_of(rng, n, k) for name in ("w_gate", "w_up")}
    return {"x": normal(rng, m, k), **weights}


def _torch_gated(m, t):
    functional = m.nn.functional
    gate = functional.silu(functional.linear(t["x"], t["w_gate"]))
    return gate * functional.linear(t["x"], t["w_up"])


def _scaled_inputs(params, rng):
    """One scale for each tensor, or the blocks of 128 that large models have."""
    m, k, n = (params[key] for key in "MKN")
    blocks = (-(-n // 128), -(-k // 128))
    shapes = ((m, blocks[1]), blocks) if params.get("blocks") else ((1,), (1,))
    scales = (np.full(shape, 0.5, np.float32) for shape in shapes)
    drawn = {"x": normal(rng, m, k), "weight": normal(rng, n, k)}
    return drawn | dict(zip(("x_scale", "weight_scale"), scales, strict=True))


def _torch_scaled(m, t):
    scales = {"scale_a": t["x_scale"][0], "scale_b": t["weight_scale"][0]}
    return m._scaled_mm(
        t["x"], t["weight"].t(), **scales, out_dtype=m.bfloat16, use_fast_accum=True
    )


def _in_bfloat16(params):
    """Our own layer of the same numbers in bfloat16."""
    made = {}  # of each set of inputs

    def call(m, t):
        import flashkernel as fk

        key = t["x"].data_ptr()
        if key not in made:
            made[key] = [t[name].bfloat16() for name in ("x", "weight")]
        return fk.linear(*made[key])

    return call


def _head_inputs(params, rng):
    n, k, v = (params[key] for key in "NKV")
    targets = rng.integers(0, v, n)
    return {"x": normal(rng, n, k), "weight": weight_of(rng, v, k), "targets": targets}


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
    PACKED,
    Workload(
        "gated_linear",
        _gated_inputs,
        lambda fk, t: fk.gated_linear(**t),
        {"torch": _torch_gated},
        counts.gated_linear,
        ("x", "w_gate", "w_up"),
        products=True,
    ),
    Workload(
        "linear",
        linear_inputs,
        _linear,
        {"torch": torch_linear, "product": _product, "openvino": openvino},
        counts.linear,
        ("x", "weight", "bias"),
        products=True,
        options=True,
    ),
    Workload(
        "scaled_linear",
        _scaled_inputs,
        lambda params: lambda fk, t: fk.scaled_linear(**t),
        {"torch": lambda params: _torch_scaled, "bfloat16": _in_bfloat16},
        counts.scaled_linear,
        products=True,
        options=True,
        errors=False,
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

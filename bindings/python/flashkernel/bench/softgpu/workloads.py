"""The workloads of the bench, and those that it times elsewhere: linear layers, and layers of
recurrent nets whose forward and backward are counted apart."""

import functools

from .. import rnn
from ..counts import Count
from ..linear import WORKLOADS as LINEAR
from ..mamba import WORKLOADS as MAMBA
from ..mamba2 import WORKLOADS as MAMBA2
from ..workloads import WORKLOADS as GENERAL
from ..workloads import Workload, normal


def _linear_inputs(params, rng):
    m, k, n = (params[name] for name in "MKN")
    tensors = {"x": normal(rng, m, k), "weight": normal(rng, n, k)}
    if params.get("bias"):
        tensors["bias"] = normal(rng, n)
    if params.get("residual"):
        tensors["residual"] = normal(rng, m, n)
    return tensors


def _linear(params):
    def call(fk, t):
        return fk.linear(
            t["x"], t["weight"], t.get("bias"), activation=params.get("activation"),
            residual=t.get("residual"),
        )  # fmt: skip

    return call


def _linear_count(direction, p, size):
    m, k, n = (p[name] for name in "MKN")
    x, weight, y = m * k * size, n * k * size, m * n * size
    bias = n * size if p.get("bias") else 0
    residual = y if p.get("residual") else 0
    if direction == "fwd":
        return Count(x + weight + bias + residual, y, 2 * m * n * k)
    # With an activation, what it was given is read too; the bias's gradient is written.
    before = y if p.get("activation") else 0
    return Count(x + weight + y + before, x + weight + bias, 4 * m * n * k)


_LINEAR = Workload(
    "linear",
    _linear_inputs,
    _linear,
    {},
    _linear_count,
    ("x", "weight", "bias", "residual"),
    products=True,
    options=True,
)


def _recurrent(op, params):
    def call(fk, t):
        return getattr(fk, op)(**t)[0]

    return call


def _recurrent_count(op, direction, p, size):
    b, length, inputs, hidden = (p[name] for name in "BLIH")
    steps, gates = b * length, rnn.GATES[op]
    weights, x, y = gates * hidden * (inputs + hidden + 2) * size, steps * inputs, steps * hidden
    flops = 2 * steps * gates * hidden * (inputs + hidden)
    # For the backward four numbers of each unit are kept, and a float for an LSTM's cell.
    kept = 4 * y * size + (4 * y if op == "lstm" else 0)
    if direction == "fwd":
        return Count(x * size + weights, y * size + kept, flops)
    return Count((x + 2 * y) * size + kept + weights, x * size + weights, 2 * flops)


_RECURRENT = [
    Workload(
        op,
        functools.partial(rnn.inputs, op),
        functools.partial(_recurrent, op),
        {},
        functools.partial(_recurrent_count, op),
        ("x", "w_ih", "w_hh", "b_ih", "b_hh"),
        products=True,
        options=True,
    )
    for op in rnn.GATES
]

# The last of one name counts: this file's linear layers have more kinds of cases.
WORKLOADS = GENERAL | {w.op: w for w in (*MAMBA, *MAMBA2, *LINEAR, _LINEAR, *_RECURRENT)}

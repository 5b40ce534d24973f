"""What a project without FlashKernel has: the same functions step by step, as XLA compiles them
from Nx. Steps are written out one after another, as `Enum.reduce` makes them, or in a loop, as
`while` does. Both get the products with the input as one; `xla_axon` multiplies inside the loop,
gate by gate, as Axon's own layers do."""

import jax
from jax import numpy as jnp


def unrolled(step, state, inputs):
    """The outputs of all steps, with the steps one after another in the program."""
    outputs = []
    for t in range(inputs[0].shape[1]):
        state, y = step(state, [x[:, t] for x in inputs])
        outputs.append(y)
    return jnp.stack(outputs, 1)


def looped(step, state, inputs):
    """The same in one loop of XLA. It is a scan, which XLA sees as Nx's `while`, a loop that reads
    and writes slices; JAX takes gradients through no other."""
    by_time = [x.swapaxes(0, 1) for x in inputs]
    return jax.lax.scan(step, state, by_time)[1].swapaxes(0, 1)


def selective_scan(walk, t):
    dt = jax.nn.softplus(t["delta"] + t["delta_bias"])

    def step(state, now):
        dt, u, b, c = now
        state = jnp.exp(dt[..., None] * t["A"]) * state + (dt * u)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    first = jnp.zeros((dt.shape[0], *t["A"].shape), dt.dtype)
    y = walk(step, first, [dt, t["u"], t["B"], t["C"]])
    return (y + t["u"] * t["D"]) * jax.nn.silu(t["z"])


def lstm(walk, t):
    wx = t["x"] @ t["w_ih"].T + (t["b_ih"] + t["b_hh"])

    def step(state, now):
        h, c = state
        i, f, g, o = jnp.split(now[0] + h @ t["w_hh"].T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((wx.shape[0], t["w_hh"].shape[1]), wx.dtype)
    return walk(step, (zeros, zeros), [wx])


def gru(walk, t):
    wx = t["x"] @ t["w_ih"].T + t["b_ih"]

    def step(h, now):
        xr, xz, xn = jnp.split(now[0], 3, -1)
        hr, hz, hn = jnp.split(h @ t["w_hh"].T + t["b_hh"], 3, -1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, h

    return walk(step, jnp.zeros((wx.shape[0], t["w_hh"].shape[1]), wx.dtype), [wx])


def gates_apart(t):
    """The products of each gate, of x and of h, one by one."""
    weights = [jnp.split(t[k], t["w_hh"].shape[0] // t["w_hh"].shape[1]) for k in ("w_ih", "w_hh")]
    biases = [jnp.split(t[k], len(weights[0])) for k in ("b_ih", "b_hh")]

    def products(x, h):
        return [
            (x @ wi.T + bi, h @ wh.T + bh) for wi, wh, bi, bh in zip(*weights, *biases, strict=True)
        ]

    return products


def lstm_as_axon(t):
    products = gates_apart(t)

    def step(state, now):
        h, c = state
        i, f, g, o = (of_x + of_h for of_x, of_h in products(now[0], h))
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((t["x"].shape[0], t["w_hh"].shape[1]), t["x"].dtype)
    return looped(step, (zeros, zeros), [t["x"]])


def gru_as_axon(t):
    products = gates_apart(t)

    def step(h, now):
        (xr, hr), (xz, hz), (xn, hn) = products(now[0], h)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, h

    zeros = jnp.zeros((t["x"].shape[0], t["w_hh"].shape[1]), t["x"].dtype)
    return looped(step, zeros, [t["x"]])


def attention(t):
    """It has no steps."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", t["q"], t["k"]) * t["q"].shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, t["v"])


def _walked(function) -> dict:
    return {
        "xla_unrolled": lambda t: function(unrolled, t),
        "xla_loop": lambda t: function(looped, t),
    }


PEERS = {
    "selective_scan": _walked(selective_scan),
    "attention": {"xla_plain": attention},
    "lstm": {"xla_axon": lstm_as_axon, **_walked(lstm)},
    "gru": {"xla_axon": gru_as_axon, **_walked(gru)},
}


def peers(name: str) -> dict:
    """The function in its forms, by the names that a result file has for them."""
    return PEERS[name]

"""The blocks of a backbone. A block between two norms is `mix`, which takes the norm of the stream,
and a projection `out` of its result, which the stream is added to; None: the result itself is
added. With `last`, mix gives the newest frame alone, (B, inner)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

import flashkernel as fk

from . import initial


@dataclass(frozen=True)
class Block:
    hidden: int

    #: How many earlier frames the block reads; None: all of them.
    lookback: ClassVar[int | None] = 0
    out: ClassVar[str | None] = "out_proj.weight"

    def init(self, key, dtype) -> dict:
        raise NotImplementedError

    def init_state(self, batch, dtype):
        return ()

    def mix(self, p, x, last):
        raise NotImplementedError

    def mix_step(self, p, x, state):
        """One frame, (B, hidden): what `out` takes, and the new state."""
        return self.mix(p, x, False), state


@dataclass(frozen=True)
class FeedForward(Block):
    inner: int

    out: ClassVar[str | None] = "mixer.down.weight"

    def init(self, key, dtype):
        up, down = jax.random.split(key)
        return initial.linear(up, "mixer.up", self.inner, self.hidden, dtype) | initial.linear(
            down, "mixer.down", self.hidden, self.inner, dtype
        )

    def mix(self, p, x, last):
        x = x[:, -1] if last else x
        return fk.linear(x, p["mixer.up.weight"], activation="gelu_tanh")


@dataclass(frozen=True)
class Attention(Block):
    """The state keeps the newest `window` keys and values, as they are before they are rotated, and
    how many of them there were: (B, window, 2, heads, head_dim) and a number."""

    heads: int
    head_dim: int
    window: int
    qk_norm: bool
    eps: float

    def __post_init__(self):
        if self.window < 1:
            raise fk.Error(f"Attention: window: expected 1 or more frames, got {self.window}")
        if self.head_dim % 2:
            raise fk.Error(f"Attention: head_dim: expected an even number, got {self.head_dim}")

    @property
    def lookback(self):
        return self.window - 1

    def init(self, key, dtype):
        qkv, out = jax.random.split(key)
        width = self.heads * self.head_dim
        params = initial.linear(qkv, "qkv", 3 * width, self.hidden, dtype)
        if self.qk_norm:
            params |= initial.norm("rms", "q_norm", self.head_dim, dtype)
            params |= initial.norm("rms", "k_norm", self.head_dim, dtype)
        return params | initial.linear(out, "out_proj", self.hidden, width, dtype)

    def init_state(self, batch, dtype):
        shape = (batch, self.window, 2, self.heads, self.head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32)

    def _heads(self, rows):
        return rows.reshape(*rows.shape[:-1], -1, self.heads, self.head_dim)

    def _norm(self, p, name, x):
        return fk.rms_norm(x, p[f"{name}.weight"], eps=self.eps) if self.qk_norm else x

    def _attend(self, q, k, v, **options):
        pairs = jnp.arange(0, self.head_dim, 2, dtype=jnp.float32)
        positions = jnp.arange(k.shape[1], dtype=jnp.float32)
        angles = jnp.outer(positions, 10000.0 ** (-pairs / self.head_dim))
        y = fk.attention(q, k, v, rotary=(jnp.cos(angles), jnp.sin(angles)), **options)
        return y.reshape(*y.shape[:2], -1)

    def mix(self, p, x, last):
        weight, width = p["qkv.weight"], self.heads * self.head_dim
        q = fk.linear(x[:, -1:] if last else x, weight[:width])
        q = self._norm(p, "q_norm", self._heads(q)[:, :, 0])
        keys_values = self._heads(fk.linear(x, weight[width:]))
        k = self._norm(p, "k_norm", keys_values[:, :, 0])
        y = self._attend(q, k, keys_values[:, :, 1], causal=True, window=(self.window - 1, 0))
        return y[:, 0] if last else y

    def mix_step(self, p, x, state):
        kept, filled = state
        qkv = self._heads(fk.linear(x, p["qkv.weight"]))
        q = self._norm(p, "q_norm", qkv[:, None, 0])
        new = jnp.stack([self._norm(p, "k_norm", qkv[:, 1]), qkv[:, 2]], 1)
        kept = jnp.concatenate([kept[:, 1:], new[:, None].astype(kept.dtype)], 1)
        filled = jnp.minimum(filled + 1, self.window)
        # What was never filled stands in front.
        unseen = jnp.arange(self.window) < self.window - filled
        bias = jnp.where(unseen, -jnp.inf, 0.0).astype(x.dtype)[None, None, None]
        kept_now = kept.astype(x.dtype)
        y = self._attend(q, kept_now[:, :, 0], kept_now[:, :, 1], bias=bias)
        return y[:, 0], (kept, filled)


@dataclass(frozen=True)
class Convolving(Block):
    """What Mamba and its reduced form share: the projection to x and z, and the convolution."""

    d_state: int
    d_conv: int
    expand: int

    prefix: ClassVar[str] = ""

    @property
    def inner(self):
        return self.expand * self.hidden

    def _init_input(self, key, dtype):
        project, convolve = jax.random.split(key)
        params = initial.linear(
            project, f"{self.prefix}in_proj", 2 * self.inner, self.hidden, dtype
        )
        return params | initial.conv1d(
            convolve, f"{self.prefix}conv1d", self.inner, self.d_conv, dtype
        )

    def _convolution(self, p):
        return p[f"{self.prefix}conv1d.weight"][:, 0], p[f"{self.prefix}conv1d.bias"]

    def _inputs(self, p, x, last):
        """The convolved x of all frames, and z, with `last` of the newest alone."""
        weight = p[f"{self.prefix}in_proj.weight"]
        z = fk.linear(x[:, -1] if last else x, weight[self.inner :])
        x = fk.linear(x, weight[: self.inner])
        return fk.causal_conv1d(x, *self._convolution(p), activation="silu"), z

    def _inputs_step(self, p, x, recent):
        x, z = jnp.split(fk.linear(x, p[f"{self.prefix}in_proj.weight"]), 2, -1)
        x, recent = fk.causal_conv1d_update(
            x, recent.astype(x.dtype), *self._convolution(p), activation="silu"
        )
        return x, z, recent


@dataclass(frozen=True)
class Mamba(Convolving):
    """The state: the convolution's last inputs, and the scan's state in float32."""

    lookback: ClassVar[int | None] = None
    out: ClassVar[str | None] = "mixer.out_proj.weight"
    prefix: ClassVar[str] = "mixer."

    @property
    def dt_rank(self):
        return math.ceil(self.hidden / 16)

    def init(self, key, dtype):
        inputs, select, spread, steps, out = jax.random.split(key, 5)
        params = self._init_input(inputs, dtype)
        params |= initial.linear(
            select, "mixer.x_proj", self.dt_rank + 2 * self.d_state, self.inner, dtype
        )
        # softplus(bias) is log-uniform from 0.001 to 0.1.
        dt = jnp.exp(jax.random.uniform(steps, (self.inner,)) * math.log(100) + math.log(0.001))
        dt = jnp.maximum(dt, 1e-4)
        A = jnp.arange(1, self.d_state + 1, dtype=jnp.float32)
        return {
            **params,
            "mixer.dt_proj.weight": initial.uniform(
                spread, (self.inner, self.dt_rank), self.dt_rank**-0.5, dtype
            ),
            "mixer.dt_proj.bias": (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype),
            **initial.linear(out, "mixer.out_proj", self.hidden, self.inner, dtype),
            "mixer.A_log": jnp.tile(jnp.log(A), (self.inner, 1)),
            "mixer.D": jnp.ones(self.inner, jnp.float32),
        }

    def init_state(self, batch, dtype):
        scan = jnp.zeros((batch, self.inner, self.d_state), jnp.float32)
        return jnp.zeros((batch, self.d_conv - 1, self.inner), dtype), scan

    def _selected(self, p, x):
        """dt, A, B, C and D, as the scan and its step take them."""
        rank, states = self.dt_rank, self.d_state
        dt, B, C = jnp.split(fk.linear(x, p["mixer.x_proj.weight"]), [rank, rank + states], -1)
        dt = fk.linear(dt, p["mixer.dt_proj.weight"])
        return dt, -jnp.exp(p["mixer.A_log"].astype(jnp.float32)), B, C, p["mixer.D"]

    def mix(self, p, x, last):
        x, z = self._inputs(p, x, last)
        y = fk.selective_scan(
            x, *self._selected(p, x), z=None if last else z, delta_bias=p["mixer.dt_proj.bias"],
            delta_softplus=True,
        )  # fmt: skip
        return y[:, -1] * jax.nn.silu(z) if last else y

    def mix_step(self, p, x, state):
        recent, scan = state
        x, z, recent = self._inputs_step(p, x, recent)
        y, scan = fk.selective_state_update(
            scan, x, *self._selected(p, x), z=z, dt_bias=p["mixer.dt_proj.bias"], dt_softplus=True
        )
        return y, (recent, scan)


@dataclass(frozen=True)
class GatedSSM(Convolving):
    """Every frame is the newest of a window of its own (see the torch module). The state: the
    convolution's last inputs."""

    @property
    def lookback(self):
        return self.d_conv - 1

    def init(self, key, dtype):
        inputs, select, out = jax.random.split(key, 3)
        params = self._init_input(inputs, dtype)
        params |= initial.linear(select, "x_proj", 1 + 2 * self.d_state, self.inner, dtype, True)
        return params | initial.linear(out, "out_proj", self.hidden, self.inner, dtype)

    def init_state(self, batch, dtype):
        return jnp.zeros((batch, self.d_conv - 1, self.inner), dtype)

    def _gate(self, p, x, z):
        frames = x.reshape(-1, 1, self.inner)
        selected = fk.linear(frames, p["x_proj.weight"], p["x_proj.bias"])
        dt, B, C = jnp.split(selected, [1, 1 + self.d_state], -1)
        y = fk.gated_ssm(frames, jnp.broadcast_to(dt, frames.shape), B, C)
        return y.reshape(x.shape) * jax.nn.silu(z)

    def mix(self, p, x, last):
        x, z = self._inputs(p, x, last)
        return self._gate(p, x[:, -1] if last else x, z)

    def mix_step(self, p, x, state):
        x, z, recent = self._inputs_step(p, x, state)
        return self._gate(p, x, z), recent


@dataclass(frozen=True)
class Recurrent(Block):
    """One layer of an LSTM or a GRU, whose result is added as it is. The state is a tuple of
    float32 arrays (B, hidden): h and c, or h."""

    memory: int

    lookback: ClassVar[int | None] = None
    out: ClassVar[str | None] = None
    gates: ClassVar[int]
    states: ClassVar[int]

    def init(self, key, dtype):
        of_input, of_state, kept = jax.random.split(key, 3)
        rows, bound = self.gates * self.hidden, self.hidden**-0.5
        # Units begin with memories of 1 to `memory` frames.
        keep = jnp.log(jax.random.uniform(kept, (self.hidden,), jnp.float32, 1, self.memory))
        return {
            "mixer.weight_ih_l0": initial.uniform(of_input, (rows, self.hidden), bound, dtype),
            "mixer.weight_hh_l0": initial.uniform(of_state, (rows, self.hidden), bound, dtype),
            "mixer.bias_ih_l0": self._keeping(keep).astype(dtype),
            "mixer.bias_hh_l0": jnp.zeros(rows, dtype),
        }

    def init_state(self, batch, dtype):
        return (jnp.zeros((batch, self.hidden), jnp.float32),) * self.states

    def _weights(self, p):
        return (p[f"mixer.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

    def mix(self, p, x, last):
        y = self._run(p, x)[0]
        return y[:, -1] if last else y

    def mix_step(self, p, x, state):
        y, *state = self._run(p, x[:, None], *state)
        return y[:, 0], tuple(state)


@dataclass(frozen=True)
class LSTM(Recurrent):
    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2

    def _keeping(self, keep):  # the gates' rows are i, f, g, o
        nothing = jnp.zeros_like(keep)
        return jnp.concatenate([-keep, keep, nothing, nothing])

    def _run(self, p, x, h0=None, c0=None):
        return fk.lstm(x, *self._weights(p), h0=h0, c0=c0)


@dataclass(frozen=True)
class GRU(Recurrent):
    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1

    def _keeping(self, keep):  # the gates' rows are r, z, n, and z keeps
        nothing = jnp.zeros_like(keep)
        return jnp.concatenate([nothing, keep, nothing])

    def _run(self, p, x, h0=None):
        return fk.gru(x, *self._weights(p), h0=h0)

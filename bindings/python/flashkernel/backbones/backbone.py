"""A backbone as a function of its parameters: what there is of them says which network it is."""

import numpy as np

import flashkernel as fk

from .definition import silu


class Backbone:
    """An embedding of the frame, blocks that add to a stream, and a norm in front of each block and
    behind the last.

    params: float32 arrays by the names of the state_dict of a module of
    `flashkernel.torch.backbones`, which are also those of `flashkernel.jax.backbones`' parameters.
    They tell which of the seven it is, and its sizes; `window` and `heads` of attention, and `eps`,
    they do not. ops: the module whose functions compute; `flashkernel.backbones.definition` takes
    float64 too."""

    def __init__(self, params, *, heads=4, window=60, eps=1e-5, ops=fk):
        self.params = {name: np.asarray(params[name]) for name in params}
        self.ops, self.eps = ops, eps
        self._require("embed.weight")
        self.hidden, self.input_size = self.params["embed.weight"].shape
        self.blocks = []
        while own := self._under(f"blocks.{len(self.blocks)}."):
            kind = _kind(own)
            if kind is None:
                raise fk.Error(
                    f"Backbone: params: blocks.{len(self.blocks)}: expected the parameters of a "
                    f"backbone's block, got {', '.join(sorted(own))}"
                )
            options = {"heads": heads, "window": window, "eps": eps} if kind is Attention else {}
            self.blocks.append(kind(ops, own, **options))
        for i in range(len(self.blocks) + 1):
            self._require(f"norms.{i}.weight")
        # Behind the last block that looks back, only the newest frame goes on.
        looking = [i for i, block in enumerate(self.blocks) if block.lookback != 0]
        self.last_looking = looking[-1] if looking else None

    @property
    def context(self) -> int | None:
        """How many frames the newest output depends on; None: all there were."""
        lookbacks = [block.lookback for block in self.blocks]
        return None if None in lookbacks else 1 + sum(lookbacks)

    def forward(self, x, all_frames=False):
        """x (B, L, input_size) -> (B, hidden), the last frame's; with all_frames (B, L, hidden),
        each as if it were the last."""
        if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] != self.input_size:
            raise fk.Error(
                f"Backbone: x: expected shape (B, L, {self.input_size}) with L from 1, "
                f"got {x.shape}"
            )
        last = None if all_frames else self.last_looking
        if not all_frames:
            x = x[:, -1] if last is None else x[:, -(self.context or x.shape[1]) :]
        stream = self._embed(x)
        x = self._norm(0, stream)
        for i, block in enumerate(self.blocks):
            y = block.mix(x, i == last)
            x, stream = self._add(i, y, stream[:, -1] if i == last else stream)
        return x

    __call__ = forward

    def init_state(self, batch) -> list:
        """Each block's state before the first frame of `batch` sequences."""
        return [block.init_state(batch) for block in self.blocks]

    def step(self, x, state):
        """One frame: x (B, input_size) -> (out (B, hidden), state). Use the state that comes back:
        the one given may have been written over."""
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise fk.Error(
                f"Backbone: step: x: expected shape (B, {self.input_size}), got {x.shape}"
            )
        stream = self._embed(x)
        x = self._norm(0, stream)
        after = []
        for i, (block, own) in enumerate(zip(self.blocks, state, strict=True)):
            y, own = block.step(x, own)
            x, stream = self._add(i, y, stream)
            after.append(own)
        return x, after

    def _embed(self, x):
        return self.ops.linear(x, self.params["embed.weight"], self.params["embed.bias"])

    def _add(self, i, y, stream):
        """What a block's result becomes: the next norm's result, and the new stream."""
        block = self.blocks[i]
        if block.out is None:
            return self._norm(i + 1, y, residual=stream)
        stream = self.ops.linear(y, block.p[block.out], residual=stream)
        return self._norm(i + 1, stream), stream

    def _norm(self, i, x, **options):
        weight, bias = (self.params.get(f"norms.{i}.{name}") for name in ("weight", "bias"))
        if bias is None:
            return self.ops.rms_norm(x, weight, eps=self.eps, **options)
        return self.ops.layer_norm(x, weight, bias, eps=self.eps, **options)

    def _require(self, name):
        if name not in self.params:
            raise fk.Error(f"Backbone: params: expected {name} among them, found none")

    def _under(self, prefix) -> dict:
        """A block's own parameters, by its own names for them."""
        names = (name for name in self.params if name.startswith(prefix))
        return {name.removeprefix(prefix): self.params[name] for name in names}


class Block:
    """Between two norms: `mix` takes the norm of the stream, (B, L, hidden), and gives what the
    projection `out` takes (None: what is added to the stream itself); with `last` of the newest
    frame alone, without the L. `step` does it for one frame, (B, hidden)."""

    lookback: int | None = 0  # how many earlier frames it reads; None: all of them
    out: str | None = "out_proj.weight"

    def __init__(self, ops, p):
        self.ops, self.p = ops, p

    def mix(self, x, last):
        raise NotImplementedError

    def step(self, x, state):
        return self.mix(x, False), state

    def init_state(self, batch):
        return ()


class FeedForward(Block):
    out = "mixer.down.weight"

    def mix(self, x, last):
        return self.ops.linear(x, self.p["mixer.up.weight"], activation="gelu_tanh")


class Attention(Block):
    """The state: keys and values of up to `window` frames, as they are before they are rotated, (B,
    frames, 2, heads, head_dim). Only differences of positions count, so each window begins at 0."""

    def __init__(self, ops, p, heads, window, eps):
        super().__init__(ops, p)
        self.heads, self.window, self.eps = heads, window, eps
        self.width = p["out_proj.weight"].shape[1]
        if self.width % heads:
            raise fk.Error(f"Backbone: heads: expected a divisor of {self.width}, got {heads}")
        self.lookback = window - 1

    def _heads(self, rows):
        return rows.reshape(*rows.shape[:-1], -1, self.heads, self.width // self.heads)

    def _norm(self, name, x):
        weight = self.p.get(f"{name}.weight")
        return x if weight is None else self.ops.rms_norm(x, weight, eps=self.eps)

    def _attend(self, q, k, v, **options):
        size = q.shape[-1]
        speeds = 10000.0 ** (-np.arange(0, size, 2) / size)
        angles = np.outer(np.arange(k.shape[1]), speeds)
        kept = np.float64 if q.dtype == np.float64 else np.float32
        tables = np.cos(angles).astype(kept), np.sin(angles).astype(kept)
        y = self.ops.attention(q, k, v, rotary=tables, **options)
        return y.reshape(*y.shape[:2], -1)

    def mix(self, x, last):
        weight = self.p["qkv.weight"]
        q = self._heads(self.ops.linear(x[:, -1:] if last else x, weight[: self.width]))[:, :, 0]
        kv = self._heads(self.ops.linear(x, weight[self.width :]))
        k, v = self._norm("k_norm", kv[:, :, 0]), kv[:, :, 1]
        q = self._norm("q_norm", q)
        y = self._attend(q, k, v, causal=True, window=(self.window - 1, 0))
        return y[:, 0] if last else y

    def init_state(self, batch):
        size = self.width // self.heads
        return np.zeros((batch, 0, 2, self.heads, size), self.p["qkv.weight"].dtype)

    def step(self, x, state):
        qkv = self._heads(self.ops.linear(x, self.p["qkv.weight"]))
        q = self._norm("q_norm", qkv[:, None, 0])
        new = np.stack([self._norm("k_norm", qkv[:, 1]), qkv[:, 2]], 1)
        forgotten = max(0, state.shape[1] - self.window + 1)
        state = np.concatenate([state[:, forgotten:], new[:, None]], 1)
        return self._attend(q, state[:, :, 0], state[:, :, 1])[:, 0], state


class _Convolving(Block):
    """What Mamba and its reduced form share: the projection to x and z, and the convolution."""

    prefix = ""

    def __init__(self, ops, p):
        super().__init__(ops, p)
        self.inner = p[self.out].shape[1]
        self.into = p[f"{self.prefix}in_proj.weight"]
        self.conv = p[f"{self.prefix}conv1d.weight"][:, 0], p[f"{self.prefix}conv1d.bias"]

    def _recent(self, batch):
        """The convolution's inputs of the frames before the first."""
        return np.zeros((batch, self.conv[0].shape[1] - 1, self.inner), self.into.dtype)

    def _inputs(self, x, last):
        """The convolved x of all frames, and z, with `last` of the newest alone."""
        z = self.ops.linear(x[:, -1] if last else x, self.into[self.inner :])
        x = self.ops.linear(x, self.into[: self.inner])
        return self.ops.causal_conv1d(x, *self.conv, activation="silu"), z

    def _inputs_step(self, x, recent):
        x, z = np.split(self.ops.linear(x, self.into), 2, -1)
        return self.ops.causal_conv1d_update(x, recent, *self.conv, activation="silu"), z


class Mamba(_Convolving):
    """The state: the convolution's last inputs, and the scan's state."""

    lookback = None
    out = "mixer.out_proj.weight"
    prefix = "mixer."

    def __init__(self, ops, p):
        super().__init__(ops, p)
        self.A, self.D = -np.exp(p["mixer.A_log"]), p["mixer.D"]
        self.spread, self.bias = p["mixer.dt_proj.weight"], p["mixer.dt_proj.bias"]

    def _selected(self, x):
        """dt, A, B, C and D, as the scan and its step take them."""
        rank, states = self.spread.shape[1], self.A.shape[1]
        selected = self.ops.linear(x, self.p["mixer.x_proj.weight"])
        dt, B, C = np.split(selected, [rank, rank + states], -1)
        return self.ops.linear(dt, self.spread), self.A, B, C, self.D

    def mix(self, x, last):
        x, z = self._inputs(x, last)
        y = self.ops.selective_scan(
            x, *self._selected(x), z=None if last else z, delta_bias=self.bias, delta_softplus=True
        )
        return y[:, -1] * silu(z) if last else y

    def init_state(self, batch):
        return self._recent(batch), np.zeros((batch, *self.A.shape), self.A.dtype)

    def step(self, x, state):
        recent, scan = state
        x, z = self._inputs_step(x, recent)
        y = self.ops.selective_state_update(
            scan, x, *self._selected(x), z=z, dt_bias=self.bias, dt_softplus=True
        )
        return y, state


class GatedSSM(_Convolving):
    """Every frame is the newest of a window of its own, of weight 1. The state: the convolution's
    last inputs."""

    def __init__(self, ops, p):
        super().__init__(ops, p)
        self.lookback = self.conv[0].shape[1] - 1

    def _gate(self, x, z):
        frames = x.reshape(-1, 1, self.inner)
        selected = self.ops.linear(frames, self.p["x_proj.weight"], self.p["x_proj.bias"])
        dt, B, C = np.split(selected, [1, 1 + selected.shape[-1] // 2], -1)
        y = self.ops.gated_ssm(frames, np.broadcast_to(dt, frames.shape), B, C)
        return y.reshape(x.shape) * silu(z)

    def mix(self, x, last):
        x, z = self._inputs(x, last)
        return self._gate(x[:, -1] if last else x, z)

    def init_state(self, batch):
        return self._recent(batch)

    def step(self, x, state):
        return self._gate(*self._inputs_step(x, state)), state


class Recurrent(Block):
    """A layer of an LSTM (four gates) or a GRU (three), whose result is added as it is. The state:
    h and c, or h."""

    lookback = None
    out = None

    def __init__(self, ops, p):
        super().__init__(ops, p)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self.weights = [p[f"mixer.{name}_l0"] for name in names]
        gates = self.weights[1].shape[0] // self.weights[1].shape[1]
        self.run, self.states = (ops.lstm, 2) if gates == 4 else (ops.gru, 1)

    def mix(self, x, last):
        y = self.run(x, *self.weights)[0]
        return y[:, -1] if last else y

    def init_state(self, batch):
        weight = self.weights[1]
        return tuple(np.zeros((batch, weight.shape[1]), weight.dtype) for _ in range(self.states))

    def step(self, x, state):
        y, *state = self.run(x[:, None], *self.weights, *state)
        return y[:, 0], tuple(state)


# Each kind of block by a parameter that no other has.
_KINDS = {
    "mixer.up.weight": FeedForward,
    "qkv.weight": Attention,
    "mixer.A_log": Mamba,
    "x_proj.weight": GatedSSM,
    "mixer.weight_hh_l0": Recurrent,
}


def _kind(own: dict):
    return next((kind for name, kind in _KINDS.items() if name in own), None)

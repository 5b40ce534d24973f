"""What all backbones have in common: the frame's embedding, a stream that blocks add to, a norm in
front of each block and behind the last, and the two ways through them, by window and by frame."""

from dataclasses import KW_ONLY, dataclass

import jax
import jax.numpy as jnp

import flashkernel as fk

from . import initial


@dataclass(frozen=True)
class Backbone:
    """Parameters are a dictionary with the names of the torch module's state_dict."""

    input_size: int = 288
    hidden: int = 256
    layers: int = 2
    _: KW_ONLY
    norm: str = "rms"
    eps: float = 1e-5

    def __post_init__(self):
        if self.norm not in ("rms", "layer"):
            raise fk.Error(f"{self._name}: norm: expected 'rms' or 'layer', got {self.norm!r}")

    @property
    def blocks(self) -> tuple:
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """How many frames the newest output depends on; None: all there were."""
        lookbacks = [block.lookback for block in self.blocks]
        return None if None in lookbacks else 1 + sum(lookbacks)

    def init(self, key, dtype=jnp.float32) -> dict:
        embed, *keys = jax.random.split(key, 1 + len(self.blocks))
        params = initial.linear(embed, "embed", self.hidden, self.input_size, dtype, bias=True)
        for i in range(len(self.blocks) + 1):
            params |= initial.norm(self.norm, f"norms.{i}", self.hidden, dtype)
        for i, (block, own) in enumerate(zip(self.blocks, keys, strict=True)):
            params |= {f"blocks.{i}.{k}": v for k, v in block.init(own, dtype).items()}
        return params

    def from_torch(self, source) -> dict:
        """The parameters of `flashkernel.torch.backbones`' module of the same name and sizes, or of
        its state_dict."""
        state = source.state_dict() if hasattr(source, "state_dict") else dict(source)
        expected = jax.eval_shape(self.init, jax.random.key(0))
        for name in sorted(expected.keys() ^ state.keys()):
            known = "no such parameter" if name in state else "a parameter, which is missing"
            raise fk.Error(f"{self._name}: from_torch: {name}: expected {known}")
        params = {}
        for name, value in state.items():
            if tuple(value.shape) != expected[name].shape:
                raise fk.Error(
                    f"{self._name}: from_torch: {name}: expected shape {expected[name].shape}, "
                    f"got {tuple(value.shape)}"
                )
            array = jnp.array(value.detach().float().cpu().numpy())
            params[name] = array.astype(str(value.dtype).removeprefix("torch."))
        return params

    def forward(self, params, x, all_frames=False):
        """x (B, L, input_size) -> (B, hidden), the last frame's; with all_frames (B, L, hidden),
        each as if it were the last."""
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise self._wrong("x", f"(B, L, {self.input_size})", x)
        looking = [i for i, block in enumerate(self.blocks) if block.lookback != 0]
        last = None if all_frames or not looking else looking[-1]
        if not all_frames:
            if x.shape[1] == 0:
                raise self._wrong("x", f"(B, L, {self.input_size}) with L from 1", x)
            x = x[:, -1] if last is None else x
            x = x[:, -self.context :] if last is not None and self.context else x
        x, stream = self._embed(params, x)
        for i, block in enumerate(self.blocks):
            own = _under(params, i)
            y = block.mix(own, x, i == last)
            x, stream = self._add(params, i, own, y, stream[:, -1] if i == last else stream)
        return x

    def init_state(self, batch, dtype=jnp.float32) -> list:
        """Each block's state before the first frame of `batch` sequences; `dtype` is that of the
        frames."""
        return [block.init_state(batch, dtype) for block in self.blocks]

    def step(self, params, x, state):
        """One frame: x (B, input_size) -> (out (B, hidden), the new state), whose arrays have the
        shapes of the old one's."""
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise self._wrong("step: x", f"(B, {self.input_size})", x)
        x, stream = self._embed(params, x)
        after = []
        for i, (block, old) in enumerate(zip(self.blocks, state, strict=True)):
            own = _under(params, i)
            y, new = block.mix_step(own, x, old)
            x, stream = self._add(params, i, own, y, stream)
            after.append(new)
        return x, after

    def _add(self, params, i, own, y, stream):
        """What a block's result becomes: the next norm, and the new stream."""
        if self.blocks[i].out is None:
            return self._norm(params, i + 1, y, residual=stream)
        return fk.linear(y, own[self.blocks[i].out], residual=stream, **self._stage(params, i + 1))

    def _embed(self, params, x):
        """The first norm and the stream."""
        weight, bias = params["embed.weight"], params["embed.bias"]
        return fk.linear(x, weight, bias, **self._stage(params, 0))

    def _stage(self, params, i):
        """What has an op write norm i of its output."""
        stage = {
            "norm": self.norm,
            "norm_weight": params[f"norms.{i}.weight"],
            "norm_eps": self.eps,
        }
        return stage | ({"norm_bias": params[f"norms.{i}.bias"]} if self.norm == "layer" else {})

    def _norm(self, params, i, x, **options):
        weight = params[f"norms.{i}.weight"]
        if self.norm == "rms":
            return fk.rms_norm(x, weight, eps=self.eps, **options)
        return fk.layer_norm(x, weight, params[f"norms.{i}.bias"], eps=self.eps, **options)

    @property
    def _name(self):
        return type(self).__name__

    def _wrong(self, name, expected, x):
        return fk.Error(f"{self._name}: {name}: expected shape {expected}, got {tuple(x.shape)}")


def _under(params, i) -> dict:
    """A block's own parameters, by its own names for them."""
    prefix = f"blocks.{i}."
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}

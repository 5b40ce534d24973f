"""What all backbones have in common: the frame's embedding, a stream that blocks add to, a norm in
front of each block and behind the last, and the two ways through them, by window and by frame."""

import torch
from torch import nn

import flashkernel as fk

from .._linear import Linear
from .norms import NORMS


def is_known(size) -> bool:
    """Whether a size is a number: in a program that is exported for any length it is a symbol, of
    which nothing may be asked."""
    return isinstance(size, int)


class Block(nn.Module):
    """One layer between two norms. `forward` takes the norm of the stream, computes what this layer
    adds to it, and returns the next norm's result and the new stream: a block ends with the sum and
    the norm, so that the kernel that makes the last product can write both.

    A block that reads earlier frames says how many (`lookback`; None: all of them). With `last` it
    is given the window (B, L, hidden) and returns its last frame alone, (B, hidden), so that it can
    leave out what only earlier frames' outputs need."""

    lookback: int | None = 0

    def forward(self, x, stream, norm, last=False):
        raise NotImplementedError

    def step(self, x, stream, norm, state):
        """One frame, (B, hidden) each: as `forward` without `last`, and the new state."""
        return *self(x, stream, norm), state

    def init_state(self, batch, made) -> tuple:
        """The state before the first frame; `made` has the device and the dtype of activations."""
        return ()


class Backbone(nn.Module):
    """forward(x): x (B, L, input_size) -> (B, hidden), the last frame's; with all_frames=True
    (B, L, hidden), each as if it were the last. step(x, state): one frame x (B, input_size) ->
    (out (B, hidden), state), in memory that does not grow, without gradients; `init_state(batch)`
    is the state before the first frame. Use the state that comes back: the one given may have been
    written over."""

    def __init__(self, blocks, input_size, hidden, norm, eps, device, dtype):
        super().__init__()
        if norm not in NORMS:
            raise fk.Error(f"{type(self).__name__}: norm: expected 'rms' or 'layer', got {norm!r}")
        made = {"device": device, "dtype": dtype}
        self.input_size, self.hidden = input_size, hidden
        self.embed = Linear(input_size, hidden, **made)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(NORMS[norm](hidden, eps, **made) for _ in range(len(blocks) + 1))
        # After the last block that looks back, only the newest frame goes on.
        looking = [i for i, block in enumerate(blocks) if block.lookback != 0]
        self.last_looking = looking[-1] if looking else None
        self._context = _context(blocks)

    @property
    def context(self) -> int | None:
        """How many frames the newest output depends on; None: all there were."""
        return self._context

    def forward(self, x, all_frames=False):
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise self._wrong("x", f"(B, L, {self.input_size})", x)
        if not all_frames:
            x = self._newest(x)
        norms = iter(self.norms)
        x, stream = self.embed.add_norm(x, None, next(norms))
        last = None if all_frames else self.last_looking
        for i, (block, norm) in enumerate(zip(self.blocks, norms, strict=True)):
            x, stream = block(x, stream, norm, i == last)
        return x

    def _newest(self, x):
        """The frames that the last one's output depends on."""
        if x.shape[1] == 0:
            raise self._wrong("x", f"(B, L, {self.input_size}) with L from 1", x)
        if self.last_looking is None:
            return x[:, -1]
        if self._context is None or not is_known(x.shape[1]):
            return x
        return x[:, -self._context :]

    def init_state(self, batch, device=None, dtype=None) -> list:
        """Each block's state before the first frame of `batch` sequences."""
        weight = self.norms[0].weight
        made = {
            "device": weight.device if device is None else device,
            "dtype": weight.dtype if dtype is None else dtype,
        }
        return [block.init_state(batch, made) for block in self.blocks]

    @torch.no_grad()
    def step(self, x, state):
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise self._wrong("step: x", f"(B, {self.input_size})", x)
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._step(x, state)
        # Each operator that writes to a state would have torch count the change, in Python, for
        # autograd to see. Here it is counted once for all, in a tenth of a step's time less.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = self._step(x, state)
        torch.autograd.graph.increment_version(
            [t for own in state for t in own if isinstance(t, torch.Tensor)]
        )
        return result

    def _step(self, x, state):
        norms = iter(self.norms)
        x, stream = self.embed.add_norm(x, None, next(norms))
        after = []
        for block, norm, own in zip(self.blocks, norms, state, strict=True):
            x, stream, own = block.step(x, stream, norm, own)
            after.append(own)
        return x, after

    def _wrong(self, name, expected, x):
        return fk.Error(
            f"{type(self).__name__}: {name}: expected shape {expected}, got {tuple(x.shape)}"
        )

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, hidden={self.hidden}, context={self.context}"


def _context(blocks) -> int | None:
    """How many frames reach the last output: each block adds those that it looks back."""
    lookbacks = [block.lookback for block in blocks]
    return None if None in lookbacks else 1 + sum(lookbacks)

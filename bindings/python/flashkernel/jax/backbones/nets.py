"""The seven backbones. `flashkernel.torch.backbones` says what each is good for."""

from dataclasses import KW_ONLY, dataclass

from . import blocks
from .backbone import Backbone


@dataclass(frozen=True)
class MLP(Backbone):
    """Feed-forward layers on the newest frame alone."""

    _: KW_ONLY
    expand: int = 2

    @property
    def blocks(self):
        return (blocks.FeedForward(self.hidden, self.expand * self.hidden),) * self.layers


@dataclass(frozen=True)
class _HasScan(Backbone):
    _: KW_ONLY
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2

    def _scanning(self, kind=blocks.Mamba):
        return kind(self.hidden, self.d_state, self.d_conv, self.expand)


@dataclass(frozen=True)
class _HasAttention(Backbone):
    _: KW_ONLY
    heads: int = 4
    head_dim: int = 64
    window: int = 60
    qk_norm: bool = False
    feed_forward: int = 4

    def _attending(self):
        """Attention, and the feed-forward block behind it."""
        attention = blocks.Attention(
            self.hidden, self.heads, self.head_dim, self.window, self.qk_norm, self.eps
        )
        return attention, blocks.FeedForward(self.hidden, self.feed_forward * self.hidden)


@dataclass(frozen=True)
class Mamba(_HasScan):
    """Layers of Mamba: a state for each channel that decays as the frame says."""

    @property
    def blocks(self):
        return (self._scanning(),) * self.layers


@dataclass(frozen=True)
class GatedSSM(_HasScan):
    """Mamba without its recurrence: gates of each frame's own, and convolutions."""

    @property
    def blocks(self):
        return (self._scanning(blocks.GatedSSM),) * self.layers


@dataclass(frozen=True)
class Attention(_HasAttention):
    """Attention over the last `window` frames, each with a GELU feed-forward network."""

    @property
    def blocks(self):
        return self._attending() * self.layers


@dataclass(frozen=True)
class Jamba(_HasScan, _HasAttention):
    """Two layers of Mamba and one of attention, over and over."""

    layers: int = 6

    @property
    def blocks(self):
        made = ()
        for i in range(self.layers):
            made += self._attending() if i % 3 == 2 else (self._scanning(),)
        return made


@dataclass(frozen=True)
class _Recurrent(Backbone):
    _: KW_ONLY
    memory: int = 60


@dataclass(frozen=True)
class LSTM(_Recurrent):
    """Layers of an LSTM, which begin with memories of 1 to `memory` frames."""

    @property
    def blocks(self):
        return (blocks.LSTM(self.hidden, self.memory),) * self.layers


@dataclass(frozen=True)
class GRU(_Recurrent):
    """Layers of a GRU, which begin with memories of 1 to `memory` frames."""

    @property
    def blocks(self):
        return (blocks.GRU(self.hidden, self.memory),) * self.layers

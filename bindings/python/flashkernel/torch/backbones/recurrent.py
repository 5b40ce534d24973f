"""LSTM and GRU as backbones."""

import torch

from ..recurrent import GRU as _GRU
from ..recurrent import LSTM as _LSTM
from .backbone import Backbone, Block


class RecurrentBlock(Block):
    """One layer of `flashkernel.torch.LSTM` or `GRU`. Its state is a tuple of float32 tensors
    (B, hidden): h and c, or h."""

    lookback = None

    def __init__(self, kind, hidden, memory, made):
        super().__init__()
        self.mixer = kind(hidden, hidden, batch_first=True, **made)
        self._remember(memory)

    @torch.no_grad()
    def _remember(self, memory):
        """Has units begin with gates that keep what they hold for 1 to `memory` frames (Tallec and
        Ollivier's chrono initialisation). Of zero gates half would be gone after one frame, and
        with it the gradient of all that is older."""
        m = self.mixer
        frames = torch.empty(m.hidden_size, device=m.bias_hh_l0.device).uniform_(1, memory)
        keep = frames.log().to(m.bias_hh_l0.dtype)
        m.bias_hh_l0.zero_()
        if m.states == 2:  # the gates' rows are i, f, g, o
            m.bias_ih_l0.zero_()
            i, f, _, _ = m.bias_ih_l0.chunk(4)
            f.copy_(keep)
            i.copy_(-keep)
        else:  # r, z, n, and z keeps
            m.bias_ih_l0.zero_()
            m.bias_ih_l0.chunk(3)[1].copy_(keep)

    def forward(self, x, stream, norm, last=False):
        if last:
            y, _ = self.mixer.layer(x)
            return norm.add(y[:, -1], stream[:, -1])
        x, stream, _ = self.mixer.layer(x, residual=stream, **norm.stage())
        return x, stream

    def step(self, x, stream, norm, state):
        x, stream, state = self.mixer.layer(
            x.unsqueeze(1), states=state, residual=stream.unsqueeze(1), **norm.stage()
        )
        return x.squeeze(1), stream.squeeze(1), state

    def init_state(self, batch, made):
        sizes = (self.mixer.states, batch, self.mixer.hidden_size)
        return torch.zeros(*sizes, device=made["device"]).unbind(0)


class _Recurrent(Backbone):
    def __init__(
        self,
        input_size=288,
        hidden=256,
        layers=2,
        *,
        memory=60,
        norm="rms",
        eps=1e-5,
        device=None,
        dtype=None,
    ):
        made = {"device": device, "dtype": dtype}
        blocks = [RecurrentBlock(self._kind, hidden, memory, made) for _ in range(layers)]
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)


class LSTM(_Recurrent):
    """Layers of an LSTM of `hidden` units, which begin with memories of 1 to `memory` frames.

    Published baseline: 20 ms."""

    _kind = _LSTM


class GRU(_Recurrent):
    """Layers of a GRU of `hidden` units: three quarters of an LSTM's weights and work. They begin
    with memories of 1 to `memory` frames.

    Published baseline: 18 ms."""

    _kind = _GRU

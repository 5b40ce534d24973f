"""A Mamba layer reduced to its gates: a convolution, and one factor for each frame."""

import torch
import torch.nn.functional as F
from torch import nn

import flashkernel as fk

from .._linear import Linear
from .backbone import Backbone, Block


class GatedSSMBlock(Block):
    """Projection to x and z, convolution with SiLU, `fk.gated_ssm`, gate by silu(z), projection.

    `fk.gated_ssm` weighs the frames of a window by their age. A frame's output would then change
    with each newer frame, and no step could give what the window gives: here every frame is the
    newest of its own window, of weight 1. Of dt the op takes the mean over channels, so dt is one
    number a frame."""

    def __init__(self, hidden, d_state, d_conv, expand, made):
        super().__init__()
        self.d_inner, self.d_state, self.d_conv = expand * hidden, d_state, d_conv
        self.lookback = d_conv - 1
        self.in_proj = Linear(hidden, 2 * self.d_inner, bias=False, **made)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, **made)
        self.x_proj = Linear(self.d_inner, 1 + 2 * d_state, **made)
        self.out_proj = Linear(self.d_inner, hidden, bias=False, **made)

    def forward(self, x, stream, norm, last=False):
        if last:
            stream = stream[:, -1]
            z = self.in_proj.rows(x[:, -1], self.d_inner, 2 * self.d_inner)
            x = self.in_proj.rows(x, 0, self.d_inner)
        else:
            x, z = self.in_proj(x).chunk(2, -1)
        x = fk.causal_conv1d(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        return self._finish(x[:, -1] if last else x, z, stream, norm)

    def step(self, x, stream, norm, state):
        x, z = self.in_proj(x).chunk(2, -1)
        recent = state[0].to(x.dtype)  # of which the caller's state may not be
        x = fk.causal_conv1d_update(
            x, recent, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        )
        return *self._finish(x, z, stream, norm), (recent,)

    def _finish(self, x, z, stream, norm):
        frames = x.flatten(0, -2).unsqueeze(1)
        dt, B, C = self.x_proj(frames).split([1, self.d_state, self.d_state], -1)
        y = fk.gated_ssm(frames, dt.expand_as(frames), B, C).view_as(x) * F.silu(z)
        return self.out_proj.add_norm(y, stream, norm)

    def init_state(self, batch, made):
        return (torch.zeros(batch, self.d_conv - 1, self.d_inner, **made),)


class GatedSSM(Backbone):
    """Mamba without its recurrence: each frame is multiplied by gates of its own, and convolutions
    over `d_conv` frames are all its memory (with 2 layers, 7 frames). Inner size `expand` times
    `hidden`, `d_state` numbers to select by.

    Published baseline: 35 ms."""

    def __init__(
        self,
        input_size=288,
        hidden=256,
        layers=2,
        *,
        d_state=16,
        d_conv=4,
        expand=2,
        norm="rms",
        eps=1e-5,
        device=None,
        dtype=None,
    ):
        made = {"device": device, "dtype": dtype}
        blocks = [GatedSSMBlock(hidden, d_state, d_conv, expand, made) for _ in range(layers)]
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)

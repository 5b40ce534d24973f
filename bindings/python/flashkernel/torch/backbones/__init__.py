"""The backbones of a real-time agent: networks that see a frame at a time and answer at once, with
one interface.

    net = flashkernel.torch.backbones.Mamba()
    out = net(window)                # (B, L, 288) -> (B, 256), the last frame's
    state = net.init_state(1)
    out, state = net.step(frame, state)  # (1, 288) -> (1, 256)

Each is an embedding of the frame, blocks that add to a stream, and a norm in front of each block
and behind the last. The published baselines are milliseconds for a window of 60 frames, by the
first version of such an agent."""

from .attention import Attention
from .backbone import Backbone
from .gated_ssm import GatedSSM
from .jamba import Jamba
from .mamba import Mamba
from .mlp import MLP
from .recurrent import GRU, LSTM

__all__ = ["GRU", "LSTM", "MLP", "Attention", "Backbone", "GatedSSM", "Jamba", "Mamba"]

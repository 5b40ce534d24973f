"""Mamba and attention in turn."""

from .attention import attention_layer
from .backbone import Backbone
from .mamba import MambaBlock


class Jamba(Backbone):
    """Two layers of Mamba and one of attention, over and over (6 layers: M M A M M A): Mamba
    carries what is old, attention looks back exactly. The layers are those of `Mamba` and
    `Attention`, the feed-forward network behind each attention included.

    Published baseline: 80 ms."""

    def __init__(
        self,
        input_size=288,
        hidden=256,
        layers=6,
        *,
        d_state=16,
        d_conv=4,
        expand=2,
        heads=4,
        head_dim=64,
        window=60,
        qk_norm=False,
        feed_forward=4,
        norm="rms",
        eps=1e-5,
        device=None,
        dtype=None,
    ):
        made = {"device": device, "dtype": dtype}
        blocks = []
        for i in range(layers):
            if i % 3 == 2:
                blocks += attention_layer(
                    hidden, heads, head_dim, window, qk_norm, feed_forward, eps, made
                )
            else:
                blocks.append(MambaBlock(hidden, d_state, d_conv, expand, made))
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)

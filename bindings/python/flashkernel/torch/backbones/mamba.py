"""Layers of Mamba: a state for each channel that decays as the frame says."""

from ..mamba import Mamba as _Mamba
from .backbone import Backbone, Block


class MambaBlock(Block):
    """`flashkernel.torch.Mamba`. Its state is that of `Mamba.step`: the convolution's last inputs
    and the scan's state."""

    lookback = None

    def __init__(self, hidden, d_state, d_conv, expand, made):
        super().__init__()
        self.mixer = _Mamba(hidden, d_state, d_conv, expand, **made)

    def forward(self, x, stream, norm, last=False):
        stream = stream[:, -1] if last else stream
        return self.mixer.out_proj.add_norm(self.mixer.mix(x, last), stream, norm)

    def step(self, x, stream, norm, state):
        mixer = self.mixer
        x = mixer.mix_step(x, state)
        return *mixer.out_proj.add_norm(x, stream, norm), state

    def init_state(self, batch, made):
        return self.mixer.allocate_state(batch, **made)


class Mamba(Backbone):
    """Layers of Mamba: inner size `expand` times `hidden`, `d_state` states a channel, convolutions
    over `d_conv` frames. It remembers what it chooses to, for any number of frames, and a step
    costs the same after an hour.

    Published baseline: 55 ms, and 10.96 ms with a CUDA kernel for the scan."""

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
        blocks = [MambaBlock(hidden, d_state, d_conv, expand, made) for _ in range(layers)]
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)

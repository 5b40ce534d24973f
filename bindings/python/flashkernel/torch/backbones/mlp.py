"""Feed-forward layers: the backbone without memory, and the second half of attention's layers."""

from ..mlp import MLP as _FeedForward
from .backbone import Backbone, Block


class FeedForward(Block):
    """down(gelu(up(x))), by the tanh's approximation of GELU."""

    def __init__(self, hidden, inner, made):
        super().__init__()
        self.mixer = _FeedForward(hidden, inner, norm=None, residual=False, **made)

    def forward(self, x, stream, norm, last=False):
        return self.mixer.down.add_norm(self.mixer.inner(x), stream, norm)


class MLP(Backbone):
    """Feed-forward layers on the newest frame alone: GELU, inner size `expand` times `hidden`. It
    has no memory, so it serves where a frame says everything.

    Published baseline: 5 ms."""

    def __init__(
        self,
        input_size=288,
        hidden=256,
        layers=2,
        *,
        expand=2,
        norm="rms",
        eps=1e-5,
        device=None,
        dtype=None,
    ):
        made = {"device": device, "dtype": dtype}
        blocks = [FeedForward(hidden, expand * hidden, made) for _ in range(layers)]
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)

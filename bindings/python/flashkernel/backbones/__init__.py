"""The backbones of a real-time agent on NumPy arrays, for machines that have neither torch nor JAX.

    params = np.load("agent.npz")  # a trained module's state_dict, as arrays
    net = flashkernel.backbones.Backbone(params)
    out = net.forward(window)  # (B, L, 288) -> (B, 256), the last frame's
    state = net.init_state(1)
    out, state = net.step(frame, state)  # (1, 288) -> (1, 256)

Training is for `flashkernel.torch.backbones` and `flashkernel.jax.backbones`. With
`ops=flashkernel.backbones.definition` the same networks are computed in plain NumPy, in float64 if
the arrays are: that is their definition, which both are tested against."""

from . import definition
from .backbone import Backbone
from .parameters import NAMES, parameters

__all__ = ["NAMES", "Backbone", "definition", "parameters"]

"""torch.nn.Linear on `fk.linear`: the layer that FlashKernel's own modules are made of."""

from torch import nn

import flashkernel as fk

__all__ = ["Linear"]


def parameter(module, name):
    """A module's parameter, without the half microsecond that torch takes to look up an attribute
    in Python: a frame asks for a hundred. Where something stands in a parameter's place, as in a
    parametrized module, it is an attribute."""
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


class Linear(nn.Linear):
    """torch.nn.Linear, its arguments and its state_dict, computed by `fk.linear`: an activation and
    a residual ride along in the same pass."""

    def forward(self, x, activation=None, residual=None):
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return fk.linear(x, weight, bias, activation=activation, residual=residual)

    def rows(self, x, start, stop):
        """The outputs `start` to `stop` alone, for a caller that needs no others."""
        bias = None if self.bias is None else self.bias[start:stop]
        return fk.linear(x, self.weight[start:stop], bias)

    def gated(self, x, gate, activation, recompute):
        """act(gate(x)) * self(x), for another such layer as the gate; neither has a bias."""
        return fk.gated_linear(
            x, gate.weight, self.weight, activation=activation, recompute=recompute
        )

    def add_norm(self, x, stream, norm):
        """Adds the layer's output to the stream, if there is one, and returns the sum's norm and
        the sum. This is where a block ends, and the next one's norm is written."""
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return fk.linear(x, weight, bias, residual=stream, **norm.stage())

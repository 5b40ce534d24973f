"""The norms of a backbone: torch's modules and state_dict on FlashKernel's ops."""

from torch import nn

import flashkernel as fk

from .._linear import parameter


class RMSNorm(nn.RMSNorm):
    def stage(self):
        """What an op takes that writes this norm of its output."""
        return {"norm_weight": parameter(self, "weight"), "norm_eps": self.eps}

    def forward(self, x):
        return fk.rms_norm(x, parameter(self, "weight"), eps=self.eps)

    def add(self, x, stream):
        """The norm of a sum, and the sum."""
        return fk.rms_norm(x, parameter(self, "weight"), residual=stream, eps=self.eps)


class LayerNorm(nn.LayerNorm):
    def stage(self):
        return {
            "norm": "layer",
            "norm_weight": parameter(self, "weight"),
            "norm_bias": parameter(self, "bias"),
            "norm_eps": self.eps,
        }

    def forward(self, x):
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return fk.layer_norm(x, weight, bias, eps=self.eps)

    def add(self, x, stream):
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return fk.layer_norm(x, weight, bias, residual=stream, eps=self.eps)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}

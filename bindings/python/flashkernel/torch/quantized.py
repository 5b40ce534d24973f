"""Linear layers in 8 bits: `flashkernel.torch.quantize`."""

import copy

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import flashkernel as fk

from ._linear import Linear
from ._operators import _lib

__all__ = ["quantize"]

#: Layers of fewer inputs stay as they are: quantizing what comes in costs as much as is won.
_LEAST_INPUTS = 64


def quantize(module, dtype="int8"):
    """A copy of a module for inference, whose linear layers multiply 8-bit integers: weights with a
    scale for each row, activations with a scale for each token, both symmetric. All else stays as
    it is: norms, convolutions, scans, attention, recurrent weights, and layers of fewer than 64
    inputs. On a CPU only.

    The copy takes no gradients. Its state_dict holds the integers and their scales; it can be
    copied, pickled, compiled and loaded into another copy of the same module.

    module: a backbone, `Mamba`, `Mamba2`, `MambaStack`, `MLP`, or any module that calls its
    torch.nn.Linear layers as modules. dtype: "int8"."""
    if dtype != "int8":
        raise fk.Error(f"quantize: dtype: expected 'int8', got {dtype!r}")
    # In a list, so that a module that is itself a layer has a place where it can be replaced.
    outer = nn.ModuleList([copy.deepcopy(module)])
    replaced = 0
    for parent in list(outer.modules()):
        for name, child in list(parent.named_children()):
            if _is_served(child) and name not in getattr(parent, "kept_in_float", ()):
                setattr(parent, name, Int8Linear(child, name))
                replaced += 1
    if not replaced:
        raise fk.Error(
            f"quantize: module: expected linear layers of {_LEAST_INPUTS} inputs or more, found "
            f"none in {type(module).__name__}"
        )
    return outer.requires_grad_(False)[0]


def _is_served(layer) -> bool:
    return type(layer) in (Linear, nn.Linear) and layer.in_features >= _LEAST_INPUTS


class Int8Linear(nn.Module):
    """What `quantize` puts in the place of a linear layer; it is called as `Linear` is. `weight`
    (out, in) int8 times `scale` (out) float32 is the layer's weight."""

    def __init__(self, layer: nn.Linear, name: str):
        super().__init__()
        weight = layer.weight.detach()
        _check_device("quantize: module", weight)
        if not weight.isfinite().all():
            raise fk.Error(
                f"quantize: {name}.weight: expected finite numbers, got some that are not"
            )
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = weight.float().abs().amax(1) / 127
        scale = scale.where(scale > 0, 1)  # of a row of zeros
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x, activation=None, residual=None):
        y = self._multiply(x, activation, 0, self.out_features)
        return y if residual is None else y + residual

    def rows(self, x, start, stop):
        return self._multiply(x, None, start, stop)

    def gated(self, x, gate, activation, recompute):
        return gate(x, activation) * self(x)

    def add_norm(self, x, stream, norm):
        y = self(x)
        return (norm(y), y) if stream is None else norm.add(y, stream)

    def _multiply(self, x, activation, start, stop):
        _check_device("int8 linear: weight", self.weight)
        if x.requires_grad and torch.is_grad_enabled():
            raise fk.Error(
                "int8 linear: x: expected a tensor that requires no gradient (a quantized layer "
                "has none), got one that does"
            )
        multiply = _operator if torch.compiler.is_compiling() else _multiply
        return multiply(x, self.weight, self.scale, self.bias, activation, start, stop)

    def _apply(self, fn, recurse=True):
        """Moves the layer; its scales stay float32 where the module becomes half precision."""
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        about = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{about}, bias={self.bias is not None}"


def _check_device(name, weight) -> None:
    if weight.device.type != "cpu":
        raise fk.Error(
            f"{name}: expected weights on the CPU (there is no int8 kernel for other devices), got "
            f"them on {weight.device}"
        )


# Of each weight: when it was packed, and what its rows were packed to, for each activation.
_packed = WeakIdKeyDictionary()


def _multiply(x, weight, scale, bias, activation, start, stop):
    version = [0 if t is None or t.is_inference() else t._version for t in (weight, scale, bias)]
    known = _packed.get(weight)
    if known is None or known[0] != version:
        known = _packed[weight] = version, {}
    key = activation, start, stop
    layer = known[1].get(key)
    if layer is None:
        rows = weight[start:stop] * scale[start:stop, None].float()
        own_bias = None if bias is None else bias[start:stop]
        layer = fk.PackedLinear(rows, own_bias, dtype="int8", activation=activation)
        known[1][key] = layer
    return layer(x.detach())


def _empty(x, weight, scale, bias, activation, start, stop):
    return x.new_empty(*x.shape[:-1], stop - start)


# For compilers, which do not look into a packed layer.
_lib.define(
    "int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str? activation, "
    "SymInt start, SymInt stop) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.impl("int8_linear", _multiply, "CPU")
torch.library.register_fake("flashkernel::int8_linear", _empty, lib=_lib)
_operator = torch.ops.flashkernel.int8_linear.default

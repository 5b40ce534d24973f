"""Torch tensors: the ops of `flashkernel` as torch operators (`torch.ops.flashkernel`), with
gradients, `torch.compile` and fake tensors. The functions here are those that `flashkernel.<op>`
calls for torch tensors; calling them directly saves the look at the first argument's type."""

import sys as _sys

import torch as _torch

from .. import _serve
from .._declarations import PUBLIC as _PUBLIC
from . import _autocast
from ._calls import make as _make
from ._operators import register as _register


def _alike(part) -> tuple:
    """What the parts of one tensor have in common with this one. Under autocast, torch.stack casts
    them to one dtype."""
    promotes = _autocast.enabled(part.device.type)
    return ("device", "shape") if promotes else ("dtype", "device", "shape")


globals().update(
    {
        name: op.public_call(_make(_register(op)), _torch.Tensor, _torch.stack, _alike)
        for name, op in _PUBLIC.items()
    }
)

_is_compiling = _torch.compiler.is_compiling


def _serve_types() -> None:
    """Lets calls find the functions of torch's own types at once."""
    _serve(_sys.modules[__name__], _torch.Tensor, _torch.nn.Parameter)


# A compiler that meets a first call may start again, and must then find what it found before.
if _torch._guards.TracingContext.try_get() is None:
    _serve_types()

from . import backbones  # noqa: E402
from ._linear import Linear  # noqa: E402
from .mamba import Mamba, MambaStack  # noqa: E402
from .mamba2 import Mamba2  # noqa: E402
from .mlp import MLP  # noqa: E402
from .quantized import quantize  # noqa: E402
from .recurrent import GRU, LSTM  # noqa: E402

__all__ = [
    *_PUBLIC,
    "GRU",
    "LSTM",
    "Linear",
    "MLP",
    "Mamba",
    "Mamba2",
    "MambaStack",
    "backbones",
    "quantize",
]

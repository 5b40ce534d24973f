"""Torch tensors: the ops of `flashkernel` as torch operators (`torch.ops.flashkernel`), with
gradients, `torch.compile` and fake tensors. The functions here are those that `flashkernel.<op>`
calls for torch tensors; calling them directly saves the look at the first argument's type."""

import sys as _sys

import torch as _torch

from .. import _serve
from .._declarations import PUBLIC as _PUBLIC
from ._calls import make as _make
from ._operators import register as _register

globals().update(
    {
        name: op.public_call(_make(_register(op)), _torch.Tensor, _torch.stack)
        for name, op in _PUBLIC.items()
    }
)

# Known from here on, so that a first call inside torch.compile need not find out.
_serve(_sys.modules[__name__], _torch.Tensor, _torch.nn.Parameter)

from .mamba import Mamba, MambaStack  # noqa: E402

__all__ = [*_PUBLIC, "Mamba", "MambaStack"]

"""Torch tensors: the ops of `flashkernel` as torch operators (`torch.ops.flashkernel`), with
gradients, `torch.compile` and fake tensors. The functions here are those that `flashkernel.<op>`
calls for torch tensors; calling them directly saves the look at the first argument's type."""

import types as _types

import torch as _torch

from .. import _serve
from .._declarations import PUBLIC as _PUBLIC
from . import _autocast
from ._calls import make as _make
from ._calls import make_direct as _make_direct
from ._operators import register as _register


def _alike(part) -> tuple:
    """What the parts of one tensor have in common with this one. Under autocast, torch.stack casts
    them to one dtype."""
    promotes = _autocast.enabled(part.device.type)
    return ("device", "shape") if promotes else ("dtype", "device", "shape")


def _functions(op):
    """What users call, and what `flashkernel.<op>` calls."""
    operators = _register(op)
    function = op.public_call(_make(operators), _torch.Tensor, _torch.stack, _alike)
    return function, _make_direct(operators, function)


_made = {name: _functions(op) for name, op in _PUBLIC.items()}
globals().update({name: function for name, (function, _) in _made.items()})

_is_compiling = _torch.compiler.is_compiling


def _serve_types() -> None:
    """Lets calls find the functions of torch's own types at once."""
    direct = _types.SimpleNamespace(**{name: direct for name, (_, direct) in _made.items()})
    _serve(direct, _torch.Tensor, _torch.nn.Parameter)


# A compiler that meets a first call may start again, and must then find what it found before.
if _torch._guards.TracingContext.try_get() is None:
    _serve_types()

from .mamba import Mamba, MambaStack  # noqa: E402

__all__ = [*_PUBLIC, "Mamba", "MambaStack"]

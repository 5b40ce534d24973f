"""FlashKernel: fused kernels for sequence models, on any CPU and on NVIDIA GPUs.

One function per op. Each takes NumPy arrays, torch tensors or JAX arrays and returns the same kind
on the same device. `help(flashkernel.rms_norm)` shows what an op computes and takes.
"""

from __future__ import annotations

import builtins as _builtins
import importlib as _importlib
import importlib.util as _importlib_util
import json as _json
import os as _os
import typing as _typing

from . import _library
from ._declarations import PUBLIC as _PUBLIC
from ._generated import compile_function as _compile_function
from ._library import Error, force_implementation, num_threads, set_cpu_target, set_num_threads

if _typing.TYPE_CHECKING:
    from ._engine import Model
    from ._model import Tokenizer
    from ._packed import PackedLinear

__version__ = _library.version().decode()


def build_info() -> dict[str, _typing.Any]:
    """Version, compiler, SIMD targets, CUDA architectures and the GPUs of this machine."""
    return _json.loads(_library.build_info().decode())


def load(
    path_or_name: str | bytes | _os.PathLike[str] = "",
    *,
    tokenizer: str | bytes | _os.PathLike[str] | None = None,
    context: int = 0,
    cache: str | None = None,
    quantize: str | None = None,
) -> Model:
    """A model from a Hugging Face folder, a .safetensors, .gguf or llama2.c .bin file, or by name
    ("smollm2", after `fk pull smollm2`; nothing: the built-in one). Returns a model with
    `generate`, `logits`, `tokenizer` and `config`.

    tokenizer: a tokenizer file, where the model has none beside it. context: tokens to hold (0:
    the model's own). cache: keys and values as "f16" or "f32". quantize: what float weights become
    ("q8_0", "q4_0", ...)."""
    from ._engine import load

    return load(path_or_name, tokenizer, context, cache, quantize)


# The function that serves each type of array, for each op; filled as types are first seen, so that
# neither torch nor JAX is imported before it is used.
_CALLS: dict[str, dict[type, object]] = {name: {} for name in _PUBLIC}


# Import statements, which torch.compile follows where it meets a first call.
def _import_numpy():
    from . import _numpy as backend

    return backend


def _import_torch():
    from . import torch as backend

    return backend


def _import_jax():
    from . import jax as backend

    return backend


_FRAMEWORKS = {
    "numpy": _import_numpy,
    "torch": _import_torch,
    "jax": _import_jax,
    "jaxlib": _import_jax,
}


def _serve(backend, *types: type) -> None:
    """Lets a module serve arrays of these types."""
    for name, calls in _CALLS.items():
        for cls in types:
            calls[cls] = getattr(backend, name)


def _find_call(op: str, argument: str, value):
    for cls in type(value).__mro__:
        framework = cls.__module__.partition(".")[0]
        if framework in _FRAMEWORKS and cls.__name__ != "generic":
            backend = _FRAMEWORKS[framework]()
            if framework != "torch":
                _serve(backend, type(value))
            elif cls is type(value) and not backend._is_compiling():
                backend._serve_types()
            return getattr(backend, op)
    raise Error(
        f"{op}: {argument}: expected a NumPy array, torch tensor or JAX array, "
        f"got {type(value).__name__}"
    )


def _make_public(op):
    first = op.arguments[0].name
    # Which framework a list is of, its first part says.
    sample = f"({first}[0] if isinstance({first}, (list, tuple)) and {first} else {first})"
    sample = sample if op.arguments[0].stacked else first
    names = ", ".join(op.parameters)
    source = f"""
def {op.public_name}({op.signature}):
    try:
        call = calls[type({sample})]
    except KeyError:
        call = find_call({op.public_name!r}, {first!r}, {sample})
    return call({names})
"""
    calls = _CALLS[op.public_name]
    function = _compile_function(source, op.public_name, calls=calls, find_call=_find_call)
    function.__doc__ = op.docstring
    function.__module__ = __name__
    return function


globals().update({name: _make_public(op) for name, op in _PUBLIC.items()})


# Submodules, and the packages that each needs; imported when they are first asked for.
_SUBMODULES = {
    "backbones": (),
    "bench": (),
    "compat": (),
    "jax": ("jax",),
    "pull": (),
    "torch": ("torch",),
    "triton": ("torch", "triton"),
}
_CLASSES = {"Model": "._engine", "PackedLinear": "._packed", "Tokenizer": "._model"}


def __getattr__(name: str):
    if name in _SUBMODULES:
        return _importlib.import_module(f".{name}", __name__)
    if name in _CLASSES:
        return getattr(_importlib.import_module(_CLASSES[name], __name__), name)
    raise AttributeError(f"module 'flashkernel' has no attribute {name!r}")


def _is_installed(package: str) -> bool:
    try:
        return _importlib_util.find_spec(package) is not None
    except (ImportError, ValueError):  # a finder that forbids it, a module without a spec
        return False


def __dir__() -> list[str]:
    """What users call, and the submodules whose packages are installed."""
    found = [name for name, needs in _SUBMODULES.items() if all(map(_is_installed, needs))]
    dunder = [name for name in globals() if name.startswith("__")]
    return sorted({*dunder, *__all__, *_PUBLIC, *found})


__all__ = [
    "Error",
    "Model",
    "PackedLinear",
    "Tokenizer",
    "build_info",
    "force_implementation",
    "load",
    "num_threads",
    "set_cpu_target",
    "set_num_threads",
    # `import *` leaves Python's own functions as they are: `sum` and `max` are for `fk.sum`.
    *(name for name in _PUBLIC if not hasattr(_builtins, name)),
]

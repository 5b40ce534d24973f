"""A linear layer whose weight is packed once: `flashkernel.PackedLinear`."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Literal

import numpy as np

from . import _arguments, _numpy
from ._handle import Handle, Owner
from ._library import Error, check, function

_P = ctypes.c_void_p
_S = ctypes.c_char_p
_pointer = ctypes.POINTER(_numpy._DLTensor)

_open = function(
    "fk_packed_linear_open", ctypes.c_int, _pointer, _pointer, _S, _S, ctypes.POINTER(_P)
)
_close = function("fk_packed_linear_close", None, _P)
_bytes = function("fk_packed_linear_bytes", ctypes.c_int64, _P)
_call = function("fk_packed_linear_call", ctypes.c_int, _P, _pointer, _pointer, _P)

_DTYPES = ("float32", "bfloat16", "int8")


class _Exec(ctypes.Structure):
    """fk_exec of include/flashkernel/abi.h; zeros are its defaults."""

    _fields_ = [
        ("stream", _P),
        ("workspace", _P),
        ("workspace_bytes", ctypes.c_size_t),
        ("parallel_for", _P),
        ("parallel_pool", _P),
        ("allocate", _P),
        ("allocator", _P),
        ("deterministic", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


@functools.cache
def _on_torchs_threads():
    """How calls with torch's tensors run: beside torch's own threads, which wait spinning, another
    pool's would take the processor from them."""
    from . import torch  # noqa: F401 (without an operator the library does not know torch)

    return ctypes.byref(_Exec(parallel_for=function("fk_torch_parallel_for", _P)()))


class PackedLinear(Owner):
    """act(x weight^T + bias) for a weight that is packed once and used often, on the CPU, without
    gradients. It is called with x (..., in), a NumPy array, a torch CPU tensor or a JAX array of
    float32, float16 or bfloat16, and returns (..., out) of that kind and dtype.

    weight: (out, in); it and `bias` (out) are copied. dtype: how the weight is kept, "float32",
    "bfloat16" (half the memory) or "int8" (a quarter: a scale for each row of the weight, and for
    each row of x, which is quantized as well); None: as it comes, float16 as float32. activation:
    as in `linear`. Several threads may call one layer at once."""

    __module__ = "flashkernel"
    _instead = "make it again, from its weight"

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        *,
        dtype: Literal["float32", "bfloat16", "int8"] | None = None,
        activation: str | None = None,
    ) -> None:
        if dtype is not None and dtype not in _DTYPES:
            raise Error(f"PackedLinear: dtype: expected one of {_DTYPES} or None, got {dtype!r}")
        if activation is not None:
            name = _arguments.text("PackedLinear", "activation", activation)
        else:
            name = b""
        w, self._weight_type = _describe("weight", weight)
        if bias is not None:
            bias, _ = _describe("bias", bias)
        kept = None if dtype is None else dtype.encode()
        handle = _P()
        given = None if bias is None else ctypes.byref(bias)
        check(_open(ctypes.byref(w), given, kept, name, ctypes.byref(handle)))
        self._handle = Handle(handle.value, _close)
        self.out_features, self.in_features = w.shape[0], w.shape[1]
        if dtype is None:
            dtype = "bfloat16" if self._weight_type == "bfloat16" else "float32"
        self.dtype, self.activation, self.nbytes = dtype, activation, _bytes(self._handle)

    def __repr__(self) -> str:
        about = f"in={self.in_features}, out={self.out_features}, {self.dtype}"
        about += f", {self.activation}" if self.activation else ""
        return f"<flashkernel.PackedLinear {about}>"

    def __call__(self, x: Any) -> Any:
        kind = _kind("x", x)
        if kind == "jax":
            import jax

            if isinstance(x, jax.core.Tracer):
                raise Error(
                    "PackedLinear: x: expected an array with values (a packed layer is called "
                    "outside of jit, grad and vmap), got a traced one"
                )
            return jax.numpy.asarray(self(np.asarray(x)))
        shape = (*x.shape[:-1], self.out_features) if x.ndim else (self.out_features,)
        if kind == "torch":
            torch = sys.modules["torch"]
            if x.requires_grad and torch.is_grad_enabled():
                raise Error(
                    "PackedLinear: x: expected a tensor that requires no gradient (a packed layer "
                    "has none; use flashkernel.linear), got one that does"
                )
            described, _ = _describe_torch("x", x)
            y, way = torch.empty(shape, dtype=x.dtype), _on_torchs_threads()
            out, _ = _describe_torch("y", y)
        else:
            described, _ = _describe("x", x)
            y, way = np.empty(shape, x.dtype), None
            out, _ = _describe("y", y)
        check(_call(self._handle, ctypes.byref(described), ctypes.byref(out), way))
        return y


def _kind(name: str, array) -> str:
    """Which framework an array is of."""
    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        return "jax"
    raise Error(
        f"PackedLinear: {name}: expected a NumPy array, torch tensor or JAX array, "
        f"got {type(array).__name__}"
    )


@functools.lru_cache(maxsize=256)
def _sizes(values: tuple[int, ...]):
    """A C array of them; nobody writes to it."""
    return (ctypes.c_int64 * (len(values) or 1))(*values)


@functools.cache
def _torch_types() -> dict:
    torch = sys.modules["torch"]
    codes = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float64": (2, 64)}
    return {getattr(torch, name): (name, *code) for name, code in codes.items()}


def _describe(name: str, array) -> tuple[_numpy._DLTensor, str]:
    """A DLTensor of an array, valid while the array is, and the name of its dtype."""
    kind = _kind(name, array)
    if kind == "torch":
        return _describe_torch(name, array)
    if kind == "jax":
        array = np.asarray(array)
    if array.dtype not in _numpy._DLPACK or isinstance(array, np.ma.MaskedArray):
        raise _wrong_dtype(name, str(array.dtype))
    dtype, (code, bits) = str(array.dtype), _numpy._DLPACK[array.dtype]
    item = array.dtype.itemsize
    if any(s % item for s in array.strides) or array.ctypes.data % item:
        array = np.ascontiguousarray(array)
    strides = tuple(s // item for s in array.strides)
    shape = _sizes(tuple(array.shape))
    tensor = _numpy._DLTensor(
        array.ctypes.data, 1, 0, array.ndim, code, bits, 1, shape, _sizes(strides), 0
    )
    tensor.alive = array
    return tensor, dtype


def _describe_torch(name: str, tensor) -> tuple[_numpy._DLTensor, str]:
    if not tensor.is_cpu:
        raise Error(
            f"PackedLinear: {name}: expected a tensor on the CPU (on a GPU, use "
            f"flashkernel.linear), got one on {tensor.device}"
        )
    known = _torch_types().get(tensor.dtype)
    if known is None or tensor.layout is not sys.modules["torch"].strided:
        raise _wrong_dtype(name, str(tensor.dtype).removeprefix("torch."))
    dtype, code, bits = known
    shape, strides = tuple(tensor.shape), tensor.stride()
    described = _numpy._DLTensor(
        tensor.data_ptr(), 1, 0, len(shape), code, bits, 1, _sizes(shape), _sizes(strides), 0
    )
    described.alive = tensor
    return described, dtype


def _wrong_dtype(name: str, got: str) -> Error:
    return Error(f"PackedLinear: {name}: expected float32, float16 or bfloat16, got {got}")

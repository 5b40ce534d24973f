"""The shared library: where it is, its C functions, its errors."""

import ctypes
import numbers
import os
import pathlib
import sys

from . import _arguments
from ._error import Error


def _find() -> str:
    if path := os.environ.get("FK_LIBRARY"):
        return path
    # An editable install has two folders: that of the sources, and that of what was built.
    for folder in sys.modules[__package__].__path__:
        for path in pathlib.Path(folder, "lib").glob("libflashkernel.so*"):
            return str(path)
    raise ImportError(
        "libflashkernel.so is not beside the flashkernel package; "
        "install it with `pip install .` or name the file in FK_LIBRARY"
    )


path = _find()
lib = ctypes.CDLL(path)


def function(name: str, restype, *argtypes):
    """A C function of the library with its signature set."""
    f = getattr(lib, name)
    f.restype = restype
    f.argtypes = argtypes
    return f


last_error = function("fk_last_error", ctypes.c_char_p)
find_op = function("fk_find_op", ctypes.c_void_p, ctypes.c_char_p)
declarations = function("fk_declarations", ctypes.c_char_p)
build_info = function("fk_build_info", ctypes.c_char_p)
version = function("fk_version", ctypes.c_char_p)
_set_num_threads = function("fk_set_num_threads", None, ctypes.c_int32)
_num_threads = function("fk_num_threads", ctypes.c_int32)
_set_cpu_target = function("fk_set_cpu_target", ctypes.c_int, ctypes.c_char_p)
_force = function("fk_force_implementation", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


def check(status: int) -> None:
    if status:
        raise Error(last_error().decode(errors="backslashreplace"))


def num_threads() -> int:
    """Threads of FlashKernel's own pool."""
    return _num_threads()


def set_num_threads(threads: int) -> None:
    """Sets that number, from 1."""
    if not isinstance(threads, numbers.Integral) or threads < 1:
        raise Error(f"set_num_threads: threads: expected a number from 1, got {threads!r}")
    _set_num_threads(min(threads, 2**31 - 1))


def set_cpu_target(name: str | None) -> None:
    """Restricts CPU kernels to a SIMD target ("sse4", "avx2", "avx3", "avx3_bf16", "neon"); None:
    the best."""
    if name is not None:
        name = _arguments.text("set_cpu_target", "name", name)
    check(_set_cpu_target(name))


def force_implementation(op: str, implementation: str | None) -> None:
    """Makes an op ("softmax_fwd") take one implementation; None restores the ranked choice."""
    call = "force_implementation"
    handle = find_op(_arguments.text(call, "op", op))
    if not handle:
        raise Error(f"{call}: expected the name of an op, got {op!r}")
    if implementation is not None:
        implementation = _arguments.text(call, "implementation", implementation)
    check(_force(handle, implementation))

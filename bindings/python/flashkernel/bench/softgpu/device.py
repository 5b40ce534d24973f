"""The software GPU inside the library, where there is one: FK_LIBRARY names such a library, and
FK_SOFTGPU_ARCH the chip that it stands for from its first launch on."""

import contextlib
import ctypes
import json

from ... import _library

HOW_TO_BUILD = (
    "build one with `cmake -S . -B build -G Ninja && ninja -C build softgpu` (it needs nvcc), and "
    "name it: FK_LIBRARY=build/libflashkernel_softgpu.so"
)

#: A launch that no sample is asked for runs all its blocks.
ALL = 2**64 - 1


def present() -> bool:
    return hasattr(_library.lib, "fk_softgpu_take_launches")


def missing() -> str:
    """What is said where the library has no software GPU."""
    return f"{_library.path} has no software GPU in it: {HOW_TO_BUILD}"


def problems() -> str:
    """What kernels did wrong since the last call, a line each."""
    return _library.function("fk_softgpu_take_problems", ctypes.c_char_p)().decode()


@contextlib.contextmanager
def launches(sample: int = ALL):
    """Gives a list that holds, at the end, every launch made inside with its counters. Of each
    launch about `sample` blocks run, spread over its grid."""
    choose = _library.function("fk_softgpu_sample", None, ctypes.c_uint64)
    record = _library.function("fk_softgpu_record", None, ctypes.c_bool)
    made = []
    record(True)
    choose(sample)
    try:
        yield made
    finally:
        made += json.loads(_library.function("fk_softgpu_take_launches", ctypes.c_char_p)())
        choose(ALL)
        record(False)

"""The software GPU as the tests see it: FK_SOFTGPU_ARCH chooses the chip, and FK_LIBRARY names
libflashkernel_softgpu.so, to which torch's CPU tensors are CUDA tensors."""

import contextlib
import ctypes
import json
import os

from flashkernel import _library

ON = "FK_SOFTGPU_ARCH" in os.environ

if ON and not hasattr(_library.lib, "fk_softgpu_take_problems"):
    raise RuntimeError(f"FK_SOFTGPU_ARCH is set, but {_library.path} has no software GPU in it")


def take_problems() -> str:
    """What kernels did wrong since the last call, a line each. The GPU takes launches again."""
    return _library.function("fk_softgpu_take_problems", ctypes.c_char_p)().decode()


def allocations() -> str:
    """What the library has allocated on the GPU and not freed, a line each."""
    return _library.function("fk_softgpu_allocations", ctypes.c_char_p)().decode()


@contextlib.contextmanager
def absent():
    """In here torch's CPU tensors are CPU tensors, as they are where there is no software GPU."""
    if not ON:
        yield
        return
    present = _library.function("fk_softgpu_present", None, ctypes.c_bool)
    present(False)
    try:
        yield
    finally:
        present(True)


def ptx_of(kernel: str) -> str:
    """The PTX of a kernel's translation unit, by the kernel's mangled name."""
    return _library.function("fk_softgpu_ptx", ctypes.c_char_p, ctypes.c_char_p)(
        kernel.encode()
    ).decode()


def replace_ptx(kernel: str, ptx: str) -> None:
    """Runs other PTX for one kernel; "" restores its own."""
    replace = _library.function(
        "fk_softgpu_replace_ptx", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p
    )
    if problem := replace(kernel.encode(), ptx.encode()):
        raise RuntimeError(problem.decode())


def decode_all() -> tuple[int, str]:
    """Decodes every kernel: how many there are, and what is not understood, a line each."""
    decode = _library.function(
        "fk_softgpu_decode_all", ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)
    )
    kernels = ctypes.c_uint64()
    problems = decode(ctypes.byref(kernels)).decode()
    return kernels.value, problems


def schedule(seed: int, check_races: bool) -> None:
    """How later launches run; FK_SOFTGPU_SEED and FK_SOFTGPU_RACES give the start."""
    function = _library.function("fk_softgpu_schedule", None, ctypes.c_uint64, ctypes.c_bool)
    function(seed, check_races)


@contextlib.contextmanager
def launches():
    """Gives a list that holds, at the end, every launch made inside with its counters."""
    record = _library.function("fk_softgpu_record", None, ctypes.c_bool)
    made = []
    record(True)
    try:
        yield made
    finally:
        taken = _library.function("fk_softgpu_take_launches", ctypes.c_char_p)()
        made += json.loads(taken)
        record(False)

"""Compiles programs of XLA that Elixir has written, with the handler that Elixir registers, and
compares their results with those of the NIF: elixir_programs.py FOLDER. A process of its own, since
the handler has the name that JAX's has in others."""

import ctypes
import os
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np
from jaxlib import _jax as xla

TYPES = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "s32": np.int32,
    "s64": np.int64,
    "f8_e4m3fn8": ml_dtypes.float8_e4m3fn,
}


def read(folder: pathlib.Path, type_name: str, file: str) -> np.ndarray:
    return np.frombuffer((folder / file).read_bytes(), TYPES[type_name])


def run(text: str, operands: list) -> list:
    device = jax.devices("cpu")[0]
    devices = xla.DeviceList((device,))
    compiled = device.client.compile_and_load(text, devices, xla.CompileOptions())
    results = compiled.execute_sharded([jax.device_put(o, device) for o in operands])
    return [np.asarray(r[0]) for r in results.disassemble_into_single_device_arrays()]


def main(folder: pathlib.Path) -> int:
    library = ctypes.CDLL(os.environ["FK_LIBRARY"])
    handler = jax.ffi.pycapsule(library.fk_exla_call_cpu)
    jax.ffi.register_ffi_target("flashkernel", handler, platform="cpu")
    jax.config.update("jax_enable_x64", True)
    programs, case = [], None
    for line in (folder / "index.txt").read_text().splitlines():
        kind, *rest = line.split()
        if kind == "case":
            case = rest[0]
        elif kind == "program":
            programs.append((case, (folder / rest[0]).read_text(), [], []))
        elif kind in ("operand", "output"):
            programs[-1][2 if kind == "operand" else 3].append(read(folder, rest[0], rest[2]))
    wrong = 0
    for case, text, operands, outputs in programs:
        results = run(text, operands)
        same = len(results) == len(outputs) and all(
            r.dtype == o.dtype and np.array_equal(r.view(np.uint8), o.view(np.uint8))
            for r, o in zip(results, outputs, strict=True)
        )
        if not same:
            wrong += 1
            print(f"case {case}: XLA's results differ\n{text}")
    print(f"{len(programs)} programs, {wrong} wrong")
    return 1 if wrong or not programs else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))

"""One op as one XLA custom call: checked when it is traced, batched through its leading dims. A
program that jax.export traces for sizes that are symbols is checked when it is called."""

import ctypes
import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from .. import _library
from .._declarations import OPS, Field, Op
from .._numpy import _DLPACK, _DLTensor, result_dtype

_TARGET = "flashkernel"
# Calls whose sizes are symbols have this target, and allocate their workspace by themselves.
_ALLOCATING_TARGET = "flashkernel_allocating"
_CPU, _CUDA = 1, 2  # DLPack's device types
_UNSUPPORTED = 2  # fk_status: valid, but this build or device has no kernel for it
_WORKSPACE_ALIGNMENT = 256

_workspace = _library.function(
    "fk_op_workspace", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)


def register() -> None:
    for target, platform, symbol in (
        (_TARGET, "cpu", "fk_xla_call_cpu"),
        (_TARGET, "CUDA", "fk_xla_call_cuda"),
        (_ALLOCATING_TARGET, "cpu", "fk_xla_call_cpu"),
        (_ALLOCATING_TARGET, "CUDA", "fk_xla_call_cuda_allocating"),
    ):
        handler = jax.ffi.pycapsule(getattr(_library.lib, symbol))
        jax.ffi.register_ffi_target(target, handler, platform=platform)


def disabled_checks() -> list:
    """What jax.export asks to be told, because a program holds calls of a target that is not
    JAX's: `jax.export.export(f, disabled_checks=flashkernel.jax.disabled_checks())`."""
    check = jax.export.DisabledSafetyCheck.custom_call
    return [check(_TARGET), check(_ALLOCATING_TARGET)]


@functools.cache
def _devices() -> tuple[int, ...]:
    """The devices a traced call may end up on."""
    on_gpu = any(d.platform == "gpu" for d in jax.devices())
    return (_CPU, _CUDA) if on_gpu else (_CPU,)


def _is_symbol(size) -> bool:
    """Tells whether a size is a symbol of jax.export, which stands for any size."""
    return not isinstance(size, (int, np.integer))


def _has_symbols(tensors: dict) -> bool:
    return any(_is_symbol(size) for t in tensors.values() for size in t.shape)


def _describe(op: Op, name: str, tensor, device: int) -> tuple[_DLTensor, object]:
    """A DLTensor without data, and what must stay alive with it."""
    dtype = tensor.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype) not in _DLPACK:
        expected = op.by_name[name].expected_dtypes
        raise _library.Error(f"{op.public_name}: {name}: expected {expected}, got {dtype}")
    code, bits = _DLPACK[np.dtype(dtype)]
    shape = (ctypes.c_int64 * max(len(tensor.shape), 1))(*tensor.shape)
    return _DLTensor(None, device, 0, len(tensor.shape), code, bits, 1, shape, None, 0), shape


def _workspace_bytes(op: Op, tensors: dict, attributes: dict) -> int:
    """Checks a call as the library will, and returns the workspace that suffices on any device; 0
    for sizes that are symbols, whose calls allocate it themselves."""
    if _has_symbols(tensors):
        return 0
    bytes_needed, refused = 0, None
    devices = _devices()
    for device in devices:
        slots, alive = [], []
        for f in op.fields:
            if not f.is_tensor:
                slots.append(struct.pack("d" if f.kind == "number" else "q", attributes[f.name]))
            elif f.name not in tensors:
                slots.append(struct.pack("Q", 0))
            else:
                tensor, shape = _describe(op, f.name, tensors[f.name], device)
                alive += [tensor, shape]
                slots.append(struct.pack("Q", ctypes.addressof(tensor)))
        needed = ctypes.c_size_t()
        status = _workspace(op.handle, b"".join(slots), ctypes.byref(needed))
        if status == _UNSUPPORTED:
            # Another device may have the kernel; the call itself says so if it lands on this one.
            refused = _library.Error(_library.last_error().decode())
            devices = tuple(d for d in devices if d != device)
            continue
        _library.check(status)
        bytes_needed = max(bytes_needed, needed.value)
    if not devices:
        raise refused
    return bytes_needed


def _results(op: Op, inputs: dict, attributes: dict, wanted: tuple[str, ...]) -> list:
    """Shape and dtype of each wanted output."""
    values = [inputs.get(f.name) if f.is_tensor else attributes[f.name] for f in op.arguments]
    shapes = dict(zip((f.name for f in op.outputs), op.output_shapes(*values), strict=True))
    sizes = [size for name in wanted for size in shapes[name]]
    if any(not _is_symbol(size) and size < 0 for size in sizes):
        raise _library.Error(f"{op.public_name}: expected inputs that give outputs a size")
    return [
        jax.ShapeDtypeStruct(shapes[name], _dtype(op, op.by_name[name], inputs)) for name in wanted
    ]


def _dtype(op: Op, output: Field, inputs: dict):
    source = op.dtype_source(output)
    if source not in op.by_name:
        return np.dtype(source)
    if source not in inputs:  # an optional activation; any other has the same dtype
        source = next(f.name for f in op.inputs if f.dtype_rule == "T" and f.name in inputs)
    dtype = np.dtype(inputs[source].dtype)
    return result_dtype(dtype) if output.dtype_rule == "T" else dtype


def same_axes(arrays) -> list:
    """The arrays, all varying over the same mesh axes (of jax.shard_map, which tracks them). Where
    one is made to vary, its gradient becomes a sum over those axes."""
    varying = [_varying_axes(a) for a in arrays]
    together = frozenset().union(*varying)
    return [_vary(a, together - v) for a, v in zip(arrays, varying, strict=True)]


def _varying_axes(array) -> frozenset:
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)  # `vma` before JAX 0.10
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def _vary(array, axes: frozenset):
    return jax.lax.pcast(array, tuple(sorted(axes)), to="varying") if axes else array


@functools.lru_cache(maxsize=4096)
def call(
    name: str,
    attributes: tuple,
    given: tuple[str, ...],
    wanted: tuple[str, ...],
    in_place: bool = False,
):
    """The function from the given inputs to the wanted outputs, both in slot order, of one op with
    its attributes fixed. `in_place` lets XLA put the output that may overwrite an input there."""
    op = OPS[name]
    by_name = {f.name: v for f, v in zip(op.attributes, attributes, strict=True)}
    for f in op.attributes:
        if f.kind != "number" and _is_symbol(by_name[f.name]):
            raise _library.Error(
                f"{op.public_name.removesuffix('_bwd')}: {f.name}: expected a number, for it is "
                f"part of the program, got {by_name[f.name]}, a symbol of jax.export; give this "
                "size as a number when exporting"
            )
    present = sum(1 << i for i, f in enumerate(op.fields) if f.name in given + wanted)
    typed = {
        f.name: np.float64(by_name[f.name]) if f.kind == "number" else np.int64(by_name[f.name])
        for f in op.attributes
    }
    aliases = {}
    for f in op.state_outputs:
        if f.updates in given and f.name in wanted:
            aliases[given.index(f.updates)] = wanted.index(f.name)
    if in_place and op.in_place_output.name in wanted:
        overwritten = given.index(op.in_place_output.may_alias)
        aliases = {overwritten: wanted.index(op.in_place_output.name)}

    @custom_vmap
    def run(*arrays):
        inputs = dict(zip(given, arrays, strict=True))
        try:
            results = _results(op, inputs, by_name, wanted)
        except Exception as error:
            if _has_symbols(inputs):
                raise _library.Error(
                    f"{op.public_name}: expected sizes from which those of its outputs follow, got "
                    f"symbols of jax.export ({error}); give these sizes as numbers when exporting"
                ) from error
            _workspace_bytes(op, inputs, by_name)  # names the argument that does not fit
            raise
        tensors = inputs | dict(zip(wanted, results, strict=True))
        if scratch := _workspace_bytes(op, tensors, by_name):
            results.append(jax.ShapeDtypeStruct((scratch + _WORKSPACE_ALIGNMENT,), np.uint8))
        arrays = same_axes(arrays)
        target = _ALLOCATING_TARGET if _has_symbols(tensors) else _TARGET
        custom_call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        outputs = custom_call(*arrays, op=name, present=np.int64(present), **typed)
        axes = _varying_axes(arrays[0])
        return tuple(_vary(o, axes - _varying_axes(o)) for o in outputs[: len(wanted)])

    @run.def_vmap
    def batched(size, is_batched, *arrays):
        inputs = [op.by_name[n] for n in given]
        folds = all(op.by_name[n].has_leading_dims for n in wanted) and all(
            not f.may_have_leading_dims and (f.has_leading_dims or not b)
            for f, b in zip(inputs, is_batched, strict=True)
        )
        if folds:  # one more leading dim, one call
            arrays = [
                jnp.broadcast_to(a, (size, *a.shape)) if f.has_leading_dims and not b else a
                for f, a, b in zip(inputs, arrays, is_batched, strict=True)
            ]
            shifted = tuple(
                v + 1 if f.kind == "axis" and v >= 0 else v
                for f, v in zip(op.attributes, attributes, strict=True)
            )
            outputs = call(name, shifted, given, wanted, in_place)(*arrays)
        else:

            def one(rows):
                rows = iter(rows)
                return run(
                    *(next(rows) if b else a for a, b in zip(arrays, is_batched, strict=True))
                )

            rows = tuple(a for a, b in zip(arrays, is_batched, strict=True) if b)
            outputs = jax.lax.map(one, rows)
        return outputs, (True,) * len(wanted)

    return run

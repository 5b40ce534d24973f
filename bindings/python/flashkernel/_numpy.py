"""NumPy arrays. Each op becomes one generated function: allocate the outputs, pack the arguments,
one C call."""

import ctypes
import struct

import numpy as np

from . import _library
from ._declarations import OPS, PUBLIC, Op
from ._generated import compile_function

try:
    import ml_dtypes

    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
    _FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
except ImportError:
    _BFLOAT16 = _FLOAT8 = None

# DLPack's (code, bits) of each dtype the library knows.
_DLPACK = {
    np.dtype(np.float32): (2, 32),
    np.dtype(np.float16): (2, 16),
    np.dtype(np.float64): (2, 64),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int64): (0, 64),
    np.dtype(np.int8): (0, 8),
    np.dtype(np.uint8): (1, 8),
}
if _BFLOAT16 is not None:
    _DLPACK[_BFLOAT16] = (4, 16)
    _DLPACK[_FLOAT8] = (10, 8)


def result_dtype(activation: np.dtype) -> np.dtype:
    """The dtype of results, given that of the activations."""
    return _BFLOAT16 if activation == _FLOAT8 and _FLOAT8 is not None else activation


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_cpu_call = _library.function("fk_cpu_call", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_workspace = _library.function(
    "fk_op_workspace", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_fast_call = _library.function("fk_numpy_call", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


def _layout_is_as_expected() -> bool:
    """Tells whether array objects lie in memory as numpy_arrays.cc reads them."""
    probe = np.zeros((3, 5), np.float32)[:, ::2]
    words = (ctypes.c_uint64 * 8).from_address(id(probe))
    expected = probe.__array_interface__["data"][0]
    if words[1] != id(np.ndarray) or words[2] != expected or words[3] & 0xFFFFFFFF != 2:
        return False
    shape = (ctypes.c_int64 * 2).from_address(words[4])
    strides = (ctypes.c_int64 * 2).from_address(words[5])
    return (*shape,) == probe.shape and (*strides,) == probe.strides and words[7] == id(probe.dtype)


def _set_up_fast_path() -> None:
    set_layout = _library.function("fk_numpy_set_layout", None, ctypes.c_void_p, ctypes.c_void_p)
    add_dtype = _library.function(
        "fk_numpy_add_dtype", None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
    )
    set_layout(id(np.ndarray) if _layout_is_as_expected() else None, id(None))
    for dtype, (code, bits) in _DLPACK.items():
        add_dtype(id(dtype), code, bits)


_set_up_fast_path()


def check_kind(op: Op, name: str, array: np.ndarray) -> None:
    expected = None
    if isinstance(array, np.ma.MaskedArray):
        expected, got = "an array that is not masked", "a masked array"
    elif array.dtype not in _DLPACK:
        expected, got = op.by_name[name].expected_dtypes, array.dtype
    if expected:
        raise _library.Error(f"{op.public_name}: {name}: expected {expected}, got {got}")


def _describe(op: Op, name: str, array) -> tuple[_DLTensor, tuple]:
    """A DLTensor of any array, and what must stay alive with it."""
    if not isinstance(array, np.ndarray):
        raise _library.Error(
            f"{op.public_name}: {name}: expected a NumPy array, got {type(array).__name__}"
        )
    check_kind(op, name, array)
    item = array.dtype.itemsize
    if any(s % item for s in array.strides) or array.ctypes.data % item:
        array = np.ascontiguousarray(array)  # fields of packed records; never an output
    code, bits = _DLPACK[array.dtype]
    sizes = ctypes.c_int64 * (array.ndim or 1)
    shape = sizes(*array.shape)
    strides = sizes(*(s // item for s in array.strides))
    tensor = _DLTensor(array.ctypes.data, 1, 0, array.ndim, code, bits, 1, shape, strides, 0)
    return tensor, (array, shape, strides)


def _pack(op: Op, values: list) -> tuple[bytes, list]:
    """The slots of a call whose tensors are described one by one."""
    packed, alive = [], []
    for f, value in zip(op.fields, values, strict=True):
        if f.is_tensor:
            if value is None:
                packed.append(struct.pack("Q", 0))
                continue
            tensor, owners = _describe(op, f.name, value)
            alive += [tensor, owners]
            packed.append(struct.pack("Q", ctypes.addressof(tensor)))
        else:
            packed.append(struct.pack("d" if f.kind == "number" else "q", value))
    return b"".join(packed), alive


def call(op: Op, values: list) -> None:
    """Runs an op on arrays given for every field, outputs included, in slot order."""
    slots, alive = _pack(op, values)
    _library.check(_cpu_call(op.handle, slots))
    del alive


def _recover(op: Op, function, given: tuple, error: Exception):
    """What a failed preparation of a call stands for: raises the error that names the argument, or
    calls again if an attribute only had to be spelled in Python's own types."""
    fixed = op.in_python_types(given)
    if any(type(a) is not type(b) for a, b in zip(fixed, given, strict=True)):
        return function(*fixed)
    by_name = {}
    for f, value in zip(op.arguments, given, strict=False):
        if f.kind == "axis" and f.nullable and value is None:
            value = 0  # some axis of the array as it is, before it was flattened
        by_name[f.name] = value if f.is_tensor else op.normalise(f, value)
    slots, alive = _pack(op, [by_name.get(f.name) for f in op.fields])
    _library.check(_workspace(op.handle, slots, ctypes.byref(ctypes.c_size_t())))
    del alive
    raise error


def _make(op: Op):
    """The function of one op on NumPy arrays, its arguments all positional."""
    arguments = [f.name for f in op.arguments] + op.extra_keywords
    visible = [f for f in op.outputs if not f.saved and not f.updates]
    prepare, cells, formats = [], [], []
    for f in op.attributes:
        if f.kind == "choice":
            prepare.append(f"{f.name} = choices_{f.name}[{f.name}]")
        elif f.kind == "number" and f.nullable:
            prepare.append(f"{f.name} = normalise(by_name[{f.name!r}], {f.name})")
    if op.axis and op.axis.nullable:
        source = next(f.name for f in op.inputs if f.along_axis)
        prepare.append(f"if {op.axis.name} is None:")
        prepare.append(f"    {source}, {op.axis.name} = {source}.reshape(-1), 0")
        prepare.append(f"    if {source}.ndim != 1:")  # a matrix, which has 2 dimensions always
        prepare.append(f"        {source} = asarray({source}).reshape(-1)")
    for i, f in enumerate(op.switches):
        prepare.append(f"if type({f.name}) is not bool:")
        prepare.append(f"    {f.name} = normalise(op.switches[{i}], {f.name})")
    named = ", ".join(f.name for f in op.arguments)
    for f in op.outputs:
        if written := f.updates or f.may_alias:
            check = f"check_writeable(op, {written!r}, {written})"
            prepare.append(f"if inplace: {check}" if f.may_alias else check)
    # The commonest case, an output of an input's own shape, needs no shape function.
    like = {f.name: _same_shape(op, f) for f in visible}
    if not all(like.values()):
        prepare.append(f"shapes = output_shapes({named})")
    for f in visible:
        source = op.dtype_source(f)
        dtype = f"{source}.dtype" if source in op.by_name else source
        if op.float8 and f.dtype_rule == "T":
            dtype = f"result_dtype({dtype})"
        shape = f"{like[f.name]}.shape" if like[f.name] else f"shapes[{op.outputs.index(f)}]"
        value = f"empty({shape}, {dtype})"
        if f.may_alias:
            value = f"{f.may_alias} if inplace else {value}"
        if f.when or f.saved_unless:
            value = f"({value}) if {op.shown_expression(f)} else None"
        prepare.append(f"{f.name}_out = {value}")
    for f in op.fields:
        if f.kind == "output":
            formats.append("Q")
            cells.append("0" if f.saved else f"id({f.updates or f'{f.name}_out'})")
        elif f.kind == "input":
            formats.append("Q")
            cells.append(f"id({f.name})")
        else:
            formats.append("d" if f.kind == "number" else "q")
            cells.append(f.name)
    always = [f for f in visible if not f.when and not f.saved_unless]
    if len(visible) == 1:
        result = f"return {visible[0].name}_out"
    elif len(always) == 1 and len(visible) == 2:
        first, second = (f"{f.name}_out" for f in visible)
        maybe = next(f"{f.name}_out" for f in visible if f not in always)
        only = f"{always[0].name}_out"
        result = f"return {only} if {maybe} is None else ({first}, {second})"
    else:
        outs = ", ".join(f"{f.name}_out" for f in visible)
        result = f"return present({outs})"
    body = "\n        ".join(prepare + [f"slots = pack({', '.join(cells)})"])
    slots_in_order = ", ".join(
        ("None" if f.saved else f.updates or f"{f.name}_out") if f.kind == "output" else f.name
        for f in op.fields
    )
    source = f"""
def {op.public_name}({", ".join(arguments)}):
    given = ({", ".join(arguments)},)
    try:
        {body}
    except Exception as error:
        return recover(op, {op.public_name}, given, error)
    status = fast_call(handle, slots)
    if status:
        if status > 0:
            check(status)
        call(op, [{slots_in_order}])
    {result}
"""
    return compile_function(
        source,
        op.public_name,
        op=op,
        by_name=op.by_name,
        normalise=op.normalise,
        handle=op.handle,
        pack=struct.Struct("=" + "".join(formats)).pack,
        asarray=np.asarray,
        empty=np.empty,
        float32=np.dtype(np.float32),
        int32=np.dtype(np.int32),
        output_shapes=op.output_shapes,
        fast_call=_fast_call,
        call=call,
        check=_library.check,
        recover=_recover,
        present=_present,
        check_writeable=_check_writeable,
        result_dtype=result_dtype,
        **{
            f"choices_{f.name}": {c or None: i for i, c in enumerate(f.choices)}
            for f in op.attributes
            if f.kind == "choice"
        },
    )


def _check_writeable(op: Op, name: str, array) -> None:
    aligned = array.flags.aligned and not any(s % array.itemsize for s in array.strides)
    if not (array.flags.writeable and aligned):
        raise _library.Error(
            f"{op.public_name}: {name}: expected an array that can be written, got "
            + ("one out of alignment" if array.flags.writeable else "a read-only one")
        )


def _same_shape(op: Op, output) -> str | None:
    """The required input whose shape the output always has, if there is one."""
    for f in op.inputs:
        same = f.shapes and f.shapes == output.shapes and f.along_axis == output.along_axis
        if same and not f.optional:
            return f.name
    return None


def _present(*outputs):
    kept = tuple(o for o in outputs if o is not None)
    return kept[0] if len(kept) == 1 else kept


globals().update(
    {name: op.public_call(_make(op), np.ndarray, np.stack) for name, op in PUBLIC.items()}
)

__all__ = [*PUBLIC, "OPS", "call"]

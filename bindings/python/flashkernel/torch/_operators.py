"""The torch operators of an op, derived from its declaration:

  flashkernel::<name>_fwd[_variant]   the outputs users see; no gradient, but under torch.func's
                                      transforms that of the next
  flashkernel::<name>[_variant]       the same kernel, also returning what the backward needs; its
                                      gradient is <name>_bwd
  flashkernel::<name>_bwd             the op's arguments and a bit mask of the gradients to compute;
                                      the others come back without elements
  flashkernel::<name>_fwd_, _bwd_     those that write one output over an input

An op whose outputs depend on its arguments (rms_norm returns the sum if there is a residual) has
one variant for each set of outputs: not as overloads, of which TorchScript would take the first
that has the types. The kernels are registered by the library itself (bindings/torch); here are the
schemas, the fake kernels and the gradients."""

import ctypes
import itertools
import string
import struct
from dataclasses import dataclass, field

import torch

from .. import _library
from .._declarations import Field, Op
from .._numpy import _DLTensor, _workspace
from . import _keys
from ._gradients import Gradient

_lib = torch.library.Library("flashkernel", "DEF")
_register_kernel = _library.function(
    "fk_torch_register",
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
)
_layout_of = _library.function(
    "fk_torch_layout_of", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32
)

_DTYPES = {"float32": torch.float32, "int32": torch.int32}
# DLPack's (code, bits) of each dtype the library knows.
DLPACK = {
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float64: (2, 64),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.float8_e4m3fn: (10, 8),
}
_CHOSEN_BY_CALL = -1
_INVALID_ARGUMENT = 1  # fk_status


@dataclass
class Variant:
    """One set of outputs, and the operators that return it."""

    name: str  # "" is the default one
    outputs: tuple[int, ...]  # which of the op's outputs exist
    visible: tuple[int, ...]  # those of them that users see
    absent: set[str]  # optional inputs that no call of this variant has
    present: set[str]  # optional inputs that every call of this variant has
    arguments: list[str]  # of `forward` and `in_place`: all but the absent ones
    forward: object = None
    in_place: object = None
    differentiable: object = None
    autograd: object = None  # as `differentiable`, for calls outside of a compiler


@dataclass
class Operators:
    """The torch operators of one op."""

    op: Op
    variants: list[Variant] = field(default_factory=list)


#: The operators of each op, by its public name.
registered: dict[str, Operators] = {}


def register(op: Op) -> Operators:
    registered[op.public_name] = result = Operators(op, _variants(op))
    for v in result.variants:
        inputs = {"absent": v.absent, "present": v.present}
        name = f"{op.public_name}_fwd"
        updated = tuple(op.outputs.index(f) for f in op.state_outputs)
        outputs = (*v.visible, *updated)
        v.forward = _operator(op, name, v.name, outputs, in_place=updated, **inputs)
        if op.in_place_output:
            written = (op.outputs.index(op.in_place_output),)
            v.in_place = _operator(op, f"{name}_", v.name, v.visible, in_place=written, **inputs)
    if op.backward:
        _register_gradients(result)
    for v in result.variants:
        _keys.serve_autocast(_lib, op, v)
    return result


def _register_gradients(operators: Operators) -> None:
    op, bwd = operators.op, operators.op.backward
    everything = range(len(bwd.outputs))
    call = _operator(bwd, bwd.public_name, "", everything, chosen_by_call=True)
    in_place_call = None
    if "inplace_backward" in op.extra_keywords:
        in_place_call = _operator(
            bwd,
            f"{bwd.public_name}_",
            "",
            everything,
            in_place=(bwd.outputs.index(bwd.in_place_output),),
            chosen_by_call=True,
        )
    # Torch's own gradient kernel for operators without one would cost more than a small backward.
    # What must not be differentiated again, _gradients takes care of.
    for backward in filter(None, (call, in_place_call)):
        _lib.impl(backward, torch.library.fallthrough_kernel, "Autograd")
    for v in operators.variants:
        # Calls that need a gradient take the other operator.
        _lib.impl(v.forward, torch.library.fallthrough_kernel, "Autograd")
        extra = ["bool inplace_backward"] if in_place_call else []
        v.differentiable = _operator(op, op.public_name, v.name, v.outputs, extra=extra)
        gradient = Gradient(op, v, call, in_place_call)
        v.autograd = gradient.function(v.differentiable)
        _keys.serve_transforms(_lib, op, v, gradient.function_under_transforms(v.differentiable))
        _keys.serve_tracer(_lib, op, v, (False,) * len(extra))
        torch.library.register_autograd(
            v.differentiable._name,
            gradient.backward,
            setup_context=_setup_context(gradient.setup),
            lib=_lib,
        )


def _setup_context(setup):
    def setup_context(ctx, inputs, output):
        setup(ctx, *inputs, output if isinstance(output, tuple) else (output,))

    return setup_context


def _variants(op: Op) -> list[Variant]:
    """Every set of outputs a call may have; that of a call by default first."""
    subjects = {}
    for output in op.outputs:
        if output.when:
            subject = op.by_name[output.condition_on]
            subjects[subject.name] = _cases(subject)
        if output.saved_unless:
            subjects[output.saved_unless] = _cases(op.by_name[output.saved_unless])
    default = {f.name: None if f.optional else object() for f in op.inputs}
    default.update({f.name: f.default for f in op.attributes})
    found: dict[tuple, list] = {}  # (outputs, those that users see) -> [(label, values)]
    for case in itertools.product(*subjects.values()):
        values = dict(zip(subjects, (value for _, value in case), strict=True))
        wanted = op.outputs_wanted(*((default | values)[f.name] for f in op.arguments))
        label = "_".join(label for label, _ in case if label)
        outputs = tuple(i for i, w in enumerate(wanted) if w)
        visible = tuple(i for i in outputs if is_visible(op.outputs[i], values))
        found.setdefault((outputs, visible), []).append((label, values))
    variants = []
    for (outputs, visible), cases in found.items():
        inputs = [name for name in subjects if op.by_name[name].kind == "input"]
        absent = {n for n in inputs if all(values[n] is None for _, values in cases)}
        present = {n for n in inputs if all(values[n] is not None for _, values in cases)}
        arguments = [f.name for f in op.arguments if f.name not in absent]
        variants.append(Variant(cases[0][0], outputs, visible, absent, present, arguments))
    return variants


def is_visible(output: Field, values: dict) -> bool:
    if output.updates:
        return False
    return not output.saved and (not output.saved_unless or bool(values[output.saved_unless]))


def _cases(f: Field) -> list[tuple[str, object]]:
    """Values of an argument, each with its label; the default first, without one."""
    if f.kind == "input":
        return [("", None), (f.name, object())]
    if f.kind == "boolean":
        return [("", f.default), (f.name, not f.default)]
    others = [(c or "none", i) for i, c in enumerate(f.choices) if i != f.default]
    return [("", f.default), *others]


def _operator(
    op,
    name,
    variant,
    outputs,
    *,
    in_place=(),
    chosen_by_call=False,
    absent=frozenset(),
    present=frozenset(),
    extra=(),
):
    """Defines one operator: schema, CPU and CUDA kernels, fake kernel. The outputs `in_place` are
    written over their inputs, and not returned."""
    name = f"{name}_{variant}" if variant else name
    written = [op.outputs[i].updates or op.outputs[i].may_alias for i in in_place]
    returned = [i for i in outputs if i not in in_place]
    boxed = {f.name for f in op.inputs if f.optional} - absent - present
    arguments = [
        _schema(op, f, written, f.name in boxed) for f in op.arguments if f.name not in absent
    ]
    arguments += extra
    if chosen_by_call:
        arguments.append("int outputs")
    results = ", ".join("Tensor" for _ in returned)
    results = results if len(returned) == 1 else f"({results})"
    _lib.define(
        f"{name}({', '.join(arguments)}) -> {results}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    error = _register_kernel(
        name.encode(),
        op.handle,
        _CHOSEN_BY_CALL if chosen_by_call else _mask(outputs),
        _mask(in_place),
        _mask(i for i, f in enumerate(op.fields) if f.name in absent),
        _mask(i for i, f in enumerate(op.fields) if f.name in boxed),
    )
    if error:
        raise ImportError(f"flashkernel: cannot register {name}: {error.decode()}")
    torch.library.register_fake(
        f"flashkernel::{name}", _fake(op, returned, chosen_by_call, absent), lib=_lib
    )
    overload = getattr(torch.ops.flashkernel, name).default
    if written:
        names = [f.name for f in op.arguments if f.name not in absent]
        _bump_versions(overload, [names.index(name) for name in written])
    return overload


def _schema(op: Op, f: Field, written: list[str], boxed: bool) -> str:
    if f.kind == "input":
        kind = "Tensor?" if boxed else "Tensor"
        if f.name in written:  # each by a letter of its own
            kind = f"Tensor({string.ascii_lowercase[written.index(f.name)]}!)"
    elif f.kind == "integer":
        is_size = any(d.symbol == f.name for o in op.outputs for dims in o.shapes for d in dims)
        kind = "SymInt" if is_size else "int"
    else:
        kind = {"number": "float", "boolean": "bool", "choice": "int", "axis": "int"}[f.kind]
        kind += "?" if f.kind == "number" and f.nullable else ""
    return f"{kind} {f.name}"


def _mask(outputs) -> int:
    return sum(1 << i for i in outputs)


def _fake(op: Op, returned: list[int], chosen_by_call: bool, absent: set[str]):
    """Outputs of the right shape, layout, dtype and device, without values."""
    names = [f.name for f in op.arguments]
    left_out = [i for i, name in enumerate(names) if name in absent]
    tensors = [i for i, f in enumerate(op.arguments) if f.is_tensor]
    sources = [op.dtype_source(f) for f in op.outputs]
    laid_out_as = [_layout_of(op.handle, i) for i in range(len(op.outputs))]

    def fake(*given):
        arguments = list(given)
        for i in left_out:
            arguments.insert(i, None)
        given_tensors = [i for i in tensors if arguments[i] is not None]
        first = given_tensors[0]
        like = arguments[first]
        for i in given_tensors:
            # Torch comes here too with some tensors on the meta device and some not.
            if arguments[i].device != like.device:
                raise RuntimeError(
                    f"{op.public_name}: {names[i]}: expected {like.device}, where {names[first]} "
                    f"is, got {arguments[i].device}"
                )
        if all(type(s) is int for i in given_tensors for s in arguments[i].shape):
            _check(op, arguments)
        try:
            shapes = op.output_shapes(*arguments[: len(names)])
        except Exception:
            _check(op, arguments)  # names the argument that does not fit
            raise
        results = []
        for i in returned:
            if chosen_by_call and not arguments[-1] >> i & 1:
                results.append(like.new_empty(0))
                continue
            source = sources[i]
            dtype = _DTYPES.get(source) or arguments[names.index(source)].dtype
            if dtype == torch.float8_e4m3fn and op.outputs[i].dtype_rule == "T":
                dtype = torch.bfloat16
            shape = shapes[i]
            if op.outputs[i].saved and torch.compiler.is_exporting():
                shape = [_unknown_if_computed(n) for n in shape]
            model = laid_out_as[i] and arguments[names.index(laid_out_as[i].decode())]
            if model is not None and tuple(model.shape) == tuple(shape):
                results.append(torch.empty_like(model, dtype=dtype))
            else:
                results.append(like.new_empty(shape, dtype=dtype))
        if len(results) == 1:
            return results[0]
        return tuple(results) or None

    return fake


def _unknown_if_computed(size):
    """A size for a program that is exported: that an input's size, divided, is neither 0 nor 1
    must not become a condition on the input."""
    if isinstance(size, torch.SymInt) and not size.node.expr.is_symbol:
        return torch.library.get_ctx().new_dynamic_size()
    return size


def _check(op: Op, arguments: list) -> None:
    """Raises what the library finds wrong with a call, as far as that is known without its data."""
    values = dict(zip((f.name for f in op.arguments), arguments, strict=False))
    slots, alive = [], []
    for f in op.fields:
        value = values.get(f.name)
        if not f.is_tensor:
            if f.nullable and value is None:
                value = op.normalise(f, None)
            if not isinstance(value, (int, float)):
                return  # symbolic
            slots.append(struct.pack("d" if f.kind == "number" else "q", value))
        elif value is None:
            slots.append(struct.pack("Q", 0))
        elif value.dtype not in DLPACK:
            expected, got = f.expected_dtypes, str(value.dtype).removeprefix("torch.")
            raise RuntimeError(f"{op.public_name}: {f.name}: expected {expected}, got {got}")
        else:
            shape = (ctypes.c_int64 * max(value.dim(), 1))(*(int(s) for s in value.shape))
            tensor = _DLTensor(None, 1, 0, value.dim(), *DLPACK[value.dtype], 1, shape, None, 0)
            alive += [shape, tensor]
            slots.append(struct.pack("Q", ctypes.addressof(tensor)))
    status = _workspace(op.handle, b"".join(slots), ctypes.byref(ctypes.c_size_t()))
    if status == _INVALID_ARGUMENT:
        raise RuntimeError(_library.last_error().decode())


def _bump_versions(overload, written: list[int]) -> None:
    """Lets autograd notice that saved tensors were overwritten."""

    def kernel(keyset, *arguments):
        torch.autograd.graph.increment_version([arguments[i] for i in written])
        return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    _lib.impl(overload, kernel, "ADInplaceOrView", with_keyset=True)

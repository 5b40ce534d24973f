"""The function of each op on torch tensors: written as source once per op, so that a call does
nothing but choose the operator. A call that needs no gradient takes the operator without one, which
saves the microseconds of a Python autograd function."""

import torch

from .. import _library
from .._declarations import Op
from .._generated import compile_function
from . import _autocast
from ._gradients import refuse_tangents
from ._operators import DLPACK, Operators

# Tells whether torch.jit traces this call. A torch without a tracer has no such function.
_is_tracing = getattr(torch._C, "_is_tracing", lambda: False)


def make(operators: Operators):
    op = operators.op
    everything = [f.name for f in op.arguments] + op.extra_keywords
    namespace = {
        "op": op,
        "normalise": op.normalise,
        "recover": _recover,
        "in_python_type": _in_python_type,
        "grad_enabled": torch.is_grad_enabled,
        "is_compiling": torch.compiler.is_compiling,
        "is_tracing": _is_tracing,
        "autocast_active": _autocast.active,
        "needs_gradient": _needs_gradient,
        "refuse": _refuse,
        "check_overwritten": _check_overwritten,
        "transforms_active": torch._C._are_functorch_transforms_active,
        "refuse_tangents": refuse_tangents,
    }
    for i, v in enumerate(operators.variants):
        namespace[f"forward_{i}"] = v.forward
        namespace[f"in_place_{i}"] = v.in_place
        namespace[f"differentiable_{i}"] = v.differentiable
        namespace[f"autograd_{i}"] = v.autograd
        if v.autograd:
            namespace[f"under_autocast_{i}"] = _autocast.wrap(op, everything, v.autograd)

    body = []
    for f in op.attributes:
        if f.kind == "choice":
            namespace[f"choices_{f.name}"] = {c or None: i for i, c in enumerate(f.choices)}
            namespace[f"field_{f.name}"] = f
            body.append(f"{_value(f)} = choices_{f.name}.get({f.name}, -1)")
            body.append(f"if {_value(f)} < 0:")
            body.append(f"    normalise(field_{f.name}, {f.name})")
        elif f.kind == "number" and f.nullable:
            namespace[f"field_{f.name}"] = f
            body.append(f"if {f.name} is not None:")
            body.append(f"    {f.name} = normalise(field_{f.name}, {f.name})")
    if op.axis and op.axis.nullable:
        source = next(f.name for f in op.inputs if f.along_axis)
        body.append(f"if {op.axis.name} is None:")
        body.append(f"    {source}, {op.axis.name} = {source}.reshape(-1), 0")
    for f in [*op.attributes, *op.switches]:
        if kind := {"boolean": "bool", "integer": "int", "axis": "int"}.get(f.kind):
            namespace[f"field_{f.name}"] = f
            body.append(f"if type({f.name}) is not {kind}:")
            body.append(f"    {f.name} = in_python_type(op, field_{f.name}, {f.name})")
    if op.backward:
        needs = " or ".join(
            f"({f.name} is not None and {f.name}.requires_grad)"
            if f.optional
            else f"{f.name}.requires_grad"
            for f in op.inputs
            if f.dtype_rule not in ("I", "J")
        )
        body.append(f"needs = grad_enabled() and ({needs})")
        if op.float8:
            activation = next(f.name for f in op.inputs if f.dtype_rule == "T")
            namespace["float8"] = torch.float8_e4m3fn
            body.append(f"if needs and {activation}.dtype == float8:")
            body.append("    raise op.no_float8_gradient()")
        # Under torch.func's transforms and torch.jit's tracer the operators without a gradient see
        # to it themselves: for the tracer every call of a program must take one way.
        body.append("if needs and not transforms_active():")
        body.append("    if is_compiling():")
        body += _indent(_indent(_by_variant(operators, _differentiable)))
        body.append("    elif not is_tracing():")
        body += _indent(_indent(_by_variant(operators, _differentiated)))
    else:
        tensors = "".join(f"{f.name}, " for f in op.inputs)
        body.append(f"if grad_enabled() and needs_gradient(({tensors})):")
        body.append(f"    refuse(op, ({tensors}))")
        body.append(f"refuse_tangents(op, ({tensors}))")
    if op.in_place_output:
        body.append("if inplace:")
        body += _indent(_by_variant(operators, _in_place))
    body += _by_variant(operators, _forward)

    lines = "\n        ".join(body)
    source = f"""
def {op.public_name}({op.flat_signature}):
    try:
        {lines}
    except Exception as error:
        return recover(op, {op.public_name}, ({", ".join(everything)},), error)
"""
    function = compile_function(source, op.public_name, **namespace)
    function.__doc__ = op.docstring
    return function


def _in_python_type(op: Op, f, value):
    """An integer or a boolean as Python's own: torch would make one of most numbers."""
    return value if isinstance(value, (torch.SymInt, torch.SymBool)) else op.normalise(f, value)


def _needs_gradient(tensors: tuple) -> bool:
    if torch._C._are_functorch_transforms_active():
        tensors = map(_followed_inside, tensors)
    return any(t is not None and t.requires_grad for t in tensors)


def _followed_inside(tensor):
    """Looks through a tensor and those that torch.func wrapped in it for the outermost that
    requires a gradient, or else the innermost."""
    functorch = torch._C._functorch
    while tensor is not None and not tensor.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            break
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _refuse(op: Op, tensors: tuple) -> None:
    """An op without gradients would cut a graph in silence."""
    name = next(f.name for f, t in zip(op.inputs, tensors, strict=True) if _needs_gradient((t,)))
    raise _library.Error(
        f"{op.public_name}: {name}: expected a tensor that requires no gradient (this op defines "
        "none; call it under torch.no_grad()), got one that does"
    )


def _check_overwritten(op: Op, name: str, tensor) -> None:
    """Refuses to write to leaves, and views of leaves, as torch itself does in place."""
    base = tensor if tensor._base is None else tensor._base
    if base.is_leaf and base.requires_grad:
        raise _library.Error(
            f"{op.public_name}: {name}: expected a tensor that is no leaf, nor a view of one "
            "(inplace_backward writes over it), got a leaf that requires a gradient"
        )


def _value(f) -> str:
    """The local variable that holds what the operator takes for an argument."""
    return f"{f.name}_index" if f.kind == "choice" else f.name


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _by_variant(operators: Operators, branch) -> list[str]:
    """Lines that pick the variant a call's arguments ask for; branch(operators, i) returns."""
    op, lines = operators.op, []
    last = len(operators.variants) - 1
    for i, variant in enumerate(operators.variants):
        conditions = {}
        for k, output in enumerate(op.outputs):
            if output.when:
                condition = _on_values(op, output)
                conditions[condition if k in variant.outputs else f"not ({condition})"] = None
            if output.saved_unless:
                asked = output.saved_unless
                conditions[asked if k in variant.visible else f"not {asked}"] = None
        if i < last:
            lines.append(f"if {' and '.join(conditions)}:")
            lines += _indent(branch(operators, i))
        else:
            lines += branch(operators, i)
    return lines


def _on_values(op: Op, output) -> str:
    """Python that tells whether an output exists, in terms of the local variables."""
    name = output.when.partition("=")[0].rstrip("!")
    expression = op.wanted_expression(output)
    return expression.replace(name, _value(op.by_name[name]), 1)


def _arguments(op: Op, names: list[str]) -> str:
    return ", ".join(_value(op.by_name[name]) for name in names)


def _forward(operators: Operators, i: int) -> list[str]:
    return [f"return forward_{i}({_arguments(operators.op, operators.variants[i].arguments)})"]


def _differentiable(operators: Operators, i: int) -> list[str]:
    """Lines that call the operator which compilers take."""
    op, variant = operators.op, operators.variants[i]
    arguments = _arguments(op, [f.name for f in op.arguments])
    # A compiler plans memory by itself, and takes no writing to inputs in a backward.
    arguments += ", False" if "inplace_backward" in op.extra_keywords else ""
    comma = "," if len(variant.outputs) == 1 else ""
    call = f"results = differentiable_{i}({arguments}){comma}"
    return [call, *_return_visible(op, variant)]


def _differentiated(operators: Operators, i: int) -> list[str]:
    """Lines that call an autograd function in Python."""
    op, variant = operators.op, operators.variants[i]
    arguments, lines = _arguments(op, [f.name for f in op.arguments]), []
    if "inplace_backward" in op.extra_keywords:
        arguments += ", inplace_backward"
        written = op.backward.in_place_output.may_alias
        lines = ["if inplace_backward:", f"    check_overwritten(op, {written!r}, {written})"]
    comma = "," if len(variant.outputs) == 1 else ""
    lines.append(f"apply = under_autocast_{i} if autocast_active() else autograd_{i}")
    lines.append(f"results = apply({arguments}){comma}")
    return [*lines, *_return_visible(op, variant)]


def _return_visible(op: Op, variant) -> list[str]:
    lines = []
    visible = [f"results[{variant.outputs.index(k)}]" for k in variant.visible]
    if op.in_place_output:
        place = variant.visible.index(op.outputs.index(op.in_place_output))
        written = op.in_place_output.may_alias
        overwritten = [*visible]
        overwritten[place] = f"{written}.copy_({visible[place]})"
        lines = ["if inplace:", f"    return {', '.join(overwritten)}"]
    return [*lines, f"return {', '.join(visible)}"]


def _in_place(operators: Operators, i: int) -> list[str]:
    op, variant = operators.op, operators.variants[i]
    call = f"in_place_{i}({_arguments(op, variant.arguments)})"
    written = op.in_place_output.may_alias
    place = variant.visible.index(op.outputs.index(op.in_place_output))
    others = len(variant.visible) - 1
    if others == 0:
        return [call, f"return {written}"]
    results = [f"results[{k}]" for k in range(others)] if others > 1 else ["results"]
    results.insert(place, written)
    return [f"results = {call}", f"return {', '.join(results)}"]


def _recover(op: Op, function, given: tuple, error: Exception):
    """What a failed call stands for: raises the error that names the argument, or calls again if an
    attribute only had to be spelled in Python's own types (a NumPy integer as axis)."""
    if torch.compiler.is_compiling():
        raise error
    for f, value in zip(op.arguments, given, strict=False):
        if f.is_tensor:
            _check_tensor(op, f, value)
    fixed = op.in_python_types(given)
    if any(type(a) is not type(b) for a, b in zip(fixed, given, strict=True)):
        return function(*fixed)
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith(f"{op.public_name}: "):
        raise _library.Error(text) from None
    raise error


def _check_tensor(op: Op, f, value) -> None:
    def wrong(expected, got):
        raise _library.Error(f"{op.public_name}: {f.name}: expected {expected}, got {got}")

    if value is None:
        if not f.optional:
            wrong(f"a tensor {f.type}", "None")
    elif not isinstance(value, torch.Tensor):
        wrong("a torch tensor", type(value).__name__)
    elif value.layout is not torch.strided or value.is_nested:
        wrong("a dense tensor", "a nested one" if value.is_nested else value.layout)
    elif value.device.type not in ("cpu", "cuda", "meta"):
        wrong("a CPU or CUDA tensor", value.device)
    elif value.dtype not in DLPACK:
        wrong(f.expected_dtypes, str(value.dtype).removeprefix("torch."))

"""What the operators of a variant (_operators.py) do where torch asks by other dispatch keys than
those of a device and of autograd: under torch.autocast, torch.func's transforms and torch.jit's
tracer."""

from .._declarations import Op
from . import _autocast


def serve_autocast(lib, op: Op, v) -> None:
    """Has torch.autocast ask for the op's own rule."""
    changed = [f.updates for f in op.state_outputs]
    overwritten = [op.in_place_output.may_alias] if v.in_place else []
    everything = [f.name for f in op.arguments]
    for overload, names, written in (
        (v.forward, v.arguments, changed),
        (v.in_place, v.arguments, overwritten),
        (v.differentiable, everything, []),
    ):
        if overload is None:
            continue
        places = tuple(names.index(name) for name in written)
        kernel = _autocast.wrap(op, names, overload, places)
        for key in _autocast.KEYS.values():
            lib.impl(overload, kernel, key)


def serve_transforms(lib, op: Op, v, transformed) -> None:
    """Lets the operators without a gradient have one under torch.func's transforms, where calls
    cannot be told apart by their tensors."""
    under_autocast = _autocast.wrap(op, v.arguments, transformed)

    def compute(*arguments):
        return (under_autocast if _autocast.active() else transformed)(*arguments)

    _compute_otherwise(lib, op, v, "FuncTorchDynamicLayerFrontMode", compute)


def serve_tracer(lib, op: Op, v, extra: tuple) -> None:
    """Has torch.jit.trace record the operator with a gradient, whether or not the traced call needs
    one: the program may, and torch checks a trace by tracing again without gradients."""
    left_out = [i for i, f in enumerate(op.arguments) if f.name in v.absent]
    visible = [k for k, i in enumerate(v.outputs) if i in v.visible]

    def compute(*given):
        arguments = list(given)
        for i in left_out:
            arguments.insert(i, None)
        results = v.differentiable(*arguments, *extra)
        return tuple(results[k] for k in visible) if isinstance(results, tuple) else (results,)

    _compute_otherwise(lib, op, v, "Tracer", compute)


def _compute_otherwise(lib, op: Op, v, key: str, compute) -> None:
    """Where torch asks by a dispatch key, `compute`, which returns a tuple of the outputs that
    users see, does what the operators without a gradient do."""

    def kernel(*arguments):
        results = compute(*arguments)
        return results if len(results) > 1 else results[0]

    def in_place_kernel(*arguments):
        results = list(compute(*arguments))
        place = v.visible.index(op.outputs.index(op.in_place_output))
        arguments[v.arguments.index(op.in_place_output.may_alias)].copy_(results.pop(place))
        return results[0] if len(results) == 1 else tuple(results) or None

    lib.impl(v.forward, kernel, key)
    if v.in_place:
        lib.impl(v.in_place, in_place_kernel, key)

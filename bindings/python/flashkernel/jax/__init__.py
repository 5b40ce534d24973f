"""The ops on JAX arrays: one XLA custom call each, on CPU and GPU, under jit, grad and vmap.

JAX arrays cannot be updated in place, so `inplace=True` is an error. `inplace_backward=True` lets
XLA write the gradient over the input's memory where nothing else still needs it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import _library
from .._declarations import OPS, PUBLIC, Op
from .._generated import compile_function as _compile_function
from .._numpy import check_kind
from . import _call, _gradient
from ._call import disabled_checks

_call.register()


@functools.lru_cache(maxsize=4096)
def _compiled(name: str, attributes: tuple, given: tuple[str, ...], in_place_backward: bool):
    """Does as _gradient.differentiable, behind jit: JAX dispatches a compiled function several
    times faster than a custom_vjp."""
    function = _gradient.differentiable(name, attributes, given, in_place_backward)
    return jax.jit(function, inline=True)


def _array(op: Op, name: str, value):
    """JAX arrays as they are; NumPy arrays where JAX would keep their dtype."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray):
        check_kind(op, name, value)
        array = jnp.asarray(value)
        if array.dtype == value.dtype:
            return array
    kind = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise _library.Error(
        f"{op.public_name}: {name}: expected a JAX array, got {type(value).__name__}{kind}"
    )


def _apply(op: Op, inputs: tuple, attributes: tuple, **switches):
    switches = {f.name: op.normalise(f, switches[f.name]) for f in op.switches}
    if switches.get("inplace"):
        raise _library.Error(
            f"{op.public_name}: inplace: expected False, got True: JAX arrays cannot be updated "
            "in place"
        )
    named = {
        f.name: _array(op, f.name, v)
        for f, v in zip(op.inputs, inputs, strict=True)
        if v is not None
    }
    attributes = [
        None if v is None and f.kind == "axis" and f.nullable else op.normalise(f, v)
        for f, v in zip(op.attributes, attributes, strict=True)
    ]
    if op.axis and attributes[op.attributes.index(op.axis)] is None:
        attributes[op.attributes.index(op.axis)] = 0
        along = [f.name for f in op.inputs if f.along_axis and f.name in named]
        named |= {name: named[name].reshape(-1) for name in along}
    function = _compiled(
        op.name, tuple(attributes), tuple(named), switches.get("inplace_backward", False)
    )
    try:
        outputs = function(*named.values())
        if _takes_indices(op.name) and _is_on_cpu(outputs[0]):
            jax.block_until_ready(outputs)  # the call may find an index out of range
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        # "INVALID_ARGUMENT: " and the library's own message, if it comes from there.
        code, _, message = str(e).partition(": ")
        if code.isupper() and message.startswith(f"{op.public_name}: "):
            raise _library.Error(message) from None
        raise
    return outputs[0] if len(outputs) == 1 else outputs


@functools.cache
def _takes_indices(name: str) -> bool:
    return any(f.dtype_rule in ("I", "J") for f in OPS[name].inputs)


def _is_on_cpu(array) -> bool:
    """False for a tracer."""
    return not isinstance(array, jax.core.Tracer) and all(
        d.platform == "cpu" for d in array.devices()
    )


def _make(op: Op):
    inputs = "".join(f"{f.name}, " for f in op.inputs)
    attributes = "".join(f"{f.name}, " for f in op.attributes)
    extra = "".join(f", {name}={name}" for name in op.extra_keywords)
    source = f"""
def {op.public_name}({op.flat_signature}):
    return apply(op, ({inputs}), ({attributes}){extra})
"""
    function = _compile_function(source, op.public_name, op=op, apply=_apply)
    function.__doc__ = op.docstring
    function.__module__ = __name__
    return function


globals().update(
    {name: op.public_call(_make(op), jax.Array, jnp.stack) for name, op in PUBLIC.items()}
)

# These call the ops by their names above.
from . import backbones  # noqa: E402

__all__ = [*PUBLIC, "backbones", "disabled_checks"]

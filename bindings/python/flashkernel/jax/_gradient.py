"""jax.custom_vjp of each op, by the name rules that src/core/declaration.h states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import _library
from .._declarations import OPS, Field, Op
from .._generated import compile_function
from .._output_shapes import ShapeWriter
from .._shapes import move_last
from ._call import call, same_axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "perturbed"],
    meta_fields=["attributes"],
)
@dataclasses.dataclass
class _Residuals:
    """What a forward hands to its backward. JAX may put the arrays of one forward together with the
    rest of another, which was traced for other gradients: what depends on these is an array."""

    arrays: dict  # by the names of the backward's inputs
    perturbed: jax.Array  # without elements; its size: bits of the inputs a gradient is asked of
    attributes: tuple  # of the backward


@functools.cache
def _symbol_size(name: str, symbol: str):
    """f(*arguments) -> the size of a shape symbol in a call of an op."""
    op, lines = OPS[name], []
    expression, _ = ShapeWriter(op, lines).size(symbol)
    names = ", ".join(f.name for f in op.arguments)
    body = "\n".join(f"    {line}" for line in [*lines, f"return {expression}"])
    return compile_function(f"def size({names}):\n{body}", "size", move_last=move_last)


def _wanted(op: Op, given: tuple[str, ...], attributes: dict) -> list[Field]:
    """The outputs whose condition holds."""
    values = [
        (True if f.name in given else None) if f.is_tensor else attributes[f.name]
        for f in op.arguments
    ]
    return [f for f, w in zip(op.outputs, op.outputs_wanted(*values), strict=True) if w]


def _gradient_outputs(op: Op) -> dict[str, str]:
    """The backward's output for each forward input that has a gradient."""
    of = {}
    for g in op.backward.outputs:
        of[g.name.removeprefix("d")] = g.name
        if g.also_gradient_of:
            of[g.also_gradient_of] = g.name
    return of


@functools.lru_cache(maxsize=4096)
def differentiable(name: str, attributes: tuple, given: tuple[str, ...], in_place_backward: bool):
    """The function from the given inputs to the outputs users see, of one op with its attributes
    fixed, with its gradient."""
    op = OPS[name]
    by_name = {f.name: v for f, v in zip(op.attributes, attributes, strict=True)}
    existing = _wanted(op, given, by_name)
    visible = tuple(
        f.name for f in existing if not f.saved and (not f.saved_unless or by_name[f.saved_unless])
    )
    primal = call(name, attributes, given, visible)
    if op.backward is None:

        def refuse(primals, tangents):
            asked = zip(given, tangents, strict=True)
            raise _not_differentiable(
                op, next(n for n, t in asked if not isinstance(t, SymbolicZero))
            )

        function = jax.custom_jvp(primal)
        function.defjvp(refuse, symbolic_zeros=True)
        return function

    backward = op.backward
    gradient_outputs = _gradient_outputs(op)
    # Each input of the backward that is not the gradient of an output, and where it comes from.
    everything = {*given, *(f.name for f in existing)}
    cotangent_of = {f"d{f.name}": f.name for f in op.outputs}
    source_of = {}
    for f in backward.inputs:
        source = f.prefer if f.prefer in everything else f.name
        if f.when and f.when not in given:
            continue  # of no use in this call's backward
        if f.name not in cotangent_of and source in everything:
            source_of[f.name] = source
    kept = tuple(f.name for f in existing if f.name in visible or f.name in source_of.values())
    forward = _once(op, call(name, attributes, given, kept))

    def backward_attribute(f: Field, inputs: dict):
        if f.name in by_name:
            return by_name[f.name]
        values = [inputs.get(a.name) if a.is_tensor else by_name[a.name] for a in op.arguments]
        return _symbol_size(name, f.name)(*values)

    def fwd(*primals):
        perturbed = tuple(n for n, p in zip(given, primals, strict=True) if _is_perturbed(p))
        for n in perturbed:
            if n not in gradient_outputs:
                raise _not_differentiable(op, n)
        inputs = {n: p.value for n, p in zip(given, primals, strict=True)}
        if perturbed and any(v.dtype == jnp.float8_e4m3fn for v in inputs.values()):
            raise op.no_float8_gradient()
        outputs = dict(zip(kept, forward(*inputs.values()), strict=True))
        values = inputs | outputs
        residuals = _Residuals(
            {n: values[source] for n, source in source_of.items()},
            jnp.zeros((0, sum(1 << given.index(n) for n in perturbed))),
            tuple(backward_attribute(f, inputs) for f in backward.attributes),
        )
        return tuple(outputs[n] for n in visible), residuals

    def bwd(residuals, cotangents):
        arrays = dict(residuals.arrays)
        cotangents = dict(zip(visible, cotangents, strict=True))
        if all(isinstance(c, SymbolicZero) for c in cotangents.values()):
            return (None,) * len(given)
        for f in backward.inputs:
            c = cotangents.get(cotangent_of.get(f.name))
            if isinstance(c, SymbolicZero):
                c = None if f.optional else jnp.zeros(c.shape, c.dtype)
            if c is not None:
                arrays[f.name] = c
        backward_given = tuple(f.name for f in backward.inputs if f.name in arrays)
        settings = dict(
            zip((f.name for f in backward.attributes), residuals.attributes, strict=True)
        )
        bits = residuals.perturbed.shape[1]
        perturbed = [n for i, n in enumerate(given) if bits >> i & 1]
        asked = {gradient_outputs[n] for n in perturbed}
        wanted = tuple(
            f.name for f in _wanted(backward, backward_given, settings) if f.name in asked
        )
        run = call(backward.name, residuals.attributes, backward_given, wanted, in_place_backward)
        gradients = dict(
            zip(wanted, _once(op, run)(*(arrays[n] for n in backward_given)), strict=True)
        )
        return tuple(gradients[gradient_outputs[n]] if n in perturbed else None for n in given)

    function = jax.custom_vjp(primal)
    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return lambda *arrays: function(*same_axes(arrays))


def _not_differentiable(op: Op, name: str) -> _library.Error:
    return _library.Error(
        f"{op.public_name}: {name}: expected an input that no gradient is asked of, got one under "
        f"differentiation; pass jax.lax.stop_gradient({name})"
    )


def _once(op: Op, run):
    """A part of an op's gradient; a gradient of it is refused in the op's name."""

    def refuse(primals, tangents):
        raise _library.Error(
            f"{op.public_name}: expected a single backward, got a gradient of its gradient, which "
            "is not defined"
        )

    function = jax.custom_jvp(run)
    function.defjvp(refuse)
    return function


def _is_perturbed(p) -> bool:
    return p.perturbed and jnp.issubdtype(p.value.dtype, jnp.floating)

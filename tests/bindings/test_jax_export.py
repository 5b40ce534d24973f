"""jax.export of every op and of its gradients: for the sizes of some arrays, and for any."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import flashkernel as fk  # noqa: E402
import sampling  # noqa: E402
from flashkernel._declarations import PUBLIC, Op  # noqa: E402
from flashkernel._shapes import has_leading_dims  # noqa: E402
from jax_samples import Case, differentiable_inputs, fk_jax  # noqa: E402

UNCHECKED = fk.jax.disabled_checks()


def through_bytes(exported):
    """What another process would load, where JAX can write it."""
    try:
        return jax.export.deserialize(exported.serialize())
    except ImportError:  # flatbuffers is not installed
        return exported


def samples_of_one_rank(case: Case, count: int) -> list[dict]:
    found = {}
    for seed in range(500):
        sample = sampling.draw(
            case.op, seed, optionals=case.optionals, attributes={**case.settled, **case.attributes}
        )
        inputs = {f.name: sample[f.name] for f in case.op.inputs if sample[f.name] is not None}
        same = found.setdefault(tuple(v.ndim for v in inputs.values()), [])
        same.append(inputs)
        if len(same) == count:
            return same
    raise AssertionError("no such samples")


def symbolic(op: Op, inputs: dict, numbers=()) -> list:
    """The inputs' shapes as they are declared, every size that has a name being a symbol, but for
    those that are to be numbers. The ops work along the last axis."""
    shapes, scope = [], jax.export.SymbolicScope()
    for name, value in inputs.items():
        f = op.by_name[name]
        dims = next(d for d in f.shapes if has_leading_dims(d) or len(d) == value.ndim)
        # A size that may also be 1 is known when exporting.
        names = ["" if d.or_one or d.symbol in numbers else d.text for d in dims]
        if f.factors_unless in inputs:
            names = [d.symbol for d in dims]
        if has_leading_dims(dims):
            leading = value.ndim - len(dims) + 1
            names = [*(f"lead{i}" for i in range(leading)), *names[1:]]
        text = ",".join(d or str(n) for d, n in zip(names, value.shape, strict=True))
        shape = jax.export.symbolic_shape(text, scope=scope) if dims else ()
        dtype = value.dtype if value.dtype.kind == "f" else np.int32
        shapes.append(jax.ShapeDtypeStruct(shape, dtype))
    return shapes


@pytest.mark.parametrize("optionals", [False, True])
@pytest.mark.parametrize("op", PUBLIC.values(), ids=lambda op: op.public_name)
def test_export(op, optionals):
    """Of calls and of gradients, for the sizes of some arrays and for any."""
    case = Case(op, optionals, {})
    case.inputs()
    case.settled = {f.name: -1 if f.kind == "axis" else f.python_default for f in op.attributes}
    first, second = samples_of_one_rank(case, 2)
    names = tuple(first)
    function = jax.jit(lambda *arrays: fk_jax(case)(names, *arrays))
    arrays = [jnp.asarray(v) for v in first.values()]
    exported = jax.export.export(function, disabled_checks=UNCHECKED)(*arrays)
    result = through_bytes(exported).call(*arrays)
    jax.tree.map(np.testing.assert_array_equal, result, function(*arrays))
    shapes = symbolic(op, first)
    exported = through_bytes(jax.export.export(function, disabled_checks=UNCHECKED)(*shapes))
    some_known = any("?" in op.by_name[n].type for n in names)
    for inputs in [first] if some_known else [first, second]:
        arrays = [jnp.asarray(v) for v in inputs.values()]
        jax.tree.map(np.testing.assert_array_equal, exported.call(*arrays), function(*arrays))


@pytest.mark.parametrize("op", [op for op in PUBLIC.values() if op.backward], ids=lambda o: o.name)
def test_export_of_gradients(op):
    case = Case(op, False, {})
    case.settled = {f.name: -1 if f.kind == "axis" else f.python_default for f in op.attributes}
    inputs = samples_of_one_rank(case, 1)[0]
    names = tuple(inputs)
    positions = differentiable_inputs(case, inputs)

    def loss(*arrays):
        outputs = fk_jax(case)(names, *arrays)
        return sum((o.astype(jnp.float32) ** 2).sum() for o in outputs)

    function = jax.jit(jax.grad(loss, positions))
    # A backward learns some sizes as attributes, which are part of the program.
    shapes = symbolic(op, inputs, numbers=[f.name for f in op.backward.attributes])
    exported = jax.export.export(function, disabled_checks=UNCHECKED)(*shapes)
    arrays = [jnp.asarray(v) for v in inputs.values()]
    result = through_bytes(exported).call(*arrays)
    jax.tree.map(np.testing.assert_array_equal, result, function(*arrays))


def test_export_finds_what_does_not_fit_when_it_is_called():
    (rows, columns) = jax.export.symbolic_shape("rows, columns")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 8), (columns,))]
    exported = jax.export.export(jax.jit(fk.rms_norm), disabled_checks=UNCHECKED)(*shapes)
    assert exported.call(jnp.ones((3, 8)), jnp.ones(8)).shape == (3, 8)
    with pytest.raises(Exception, match=r"rms_norm: weight: expected shape \(8,\).*got \(7,\)"):
        exported.call(jnp.ones((3, 8)), jnp.ones(7)).block_until_ready()


def test_export_of_what_must_be_a_number():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((4, n), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: fk.sum(x, axis=-1).sum()))
    with pytest.raises(fk.Error, match="sum: N: expected a number.*symbol of jax.export"):
        jax.export.export(gradient, disabled_checks=UNCHECKED)(x)
    x = jax.ShapeDtypeStruct((1, n, 4), jnp.float32)
    A = -jnp.ones((4, 4))

    def scan(x):
        return fk.selective_scan(x, x, A, x, x, checkpoint=-1).sum()

    with pytest.raises(fk.Error, match="selective_scan: expected sizes from which.*symbols"):
        jax.export.export(jax.jit(jax.grad(scan)), disabled_checks=UNCHECKED)(x)

"""The JAX binding, over every op by its declaration: it returns what the NumPy call returns, its
gradients are those of finite differences, and it holds under jit and vmap."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import flashkernel as fk  # noqa: E402
from flashkernel._declarations import PUBLIC  # noqa: E402
from jax_samples import (  # noqa: E402
    CASES,
    DIFFERENTIABLE,
    EPSILON,
    Case,
    assert_close,
    differentiable_inputs,
    fk_jax,
    fk_numpy,
)

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = [jax.devices("cpu")[0], *[d for d in jax.devices() if d.platform == "gpu"][:1]]


@pytest.fixture(params=DEVICES, ids=lambda d: d.platform)
def device(request):
    with jax.default_device(request.param):
        yield request.param


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_as_numpy(case, dtype, device):
    inputs = case.inputs(dtype)
    names, arrays = tuple(inputs), [jnp.asarray(v) for v in inputs.values()]
    expected = fk_numpy(case, inputs)
    eager = fk_jax(case)(names, *arrays)
    jitted = jax.jit(fk_jax(case), static_argnums=0)(names, *arrays)
    for results in (eager, jitted):
        assert len(results) == len(expected)
        for actual, wanted in zip(results, expected, strict=True):
            assert isinstance(actual, jax.Array) and actual.devices() == {device}
            assert_close(actual, wanted, dtype)


@pytest.mark.parametrize("op", PUBLIC.values(), ids=lambda op: op.public_name)
def test_no_rows(op, device):
    leading = {f.name for f in op.inputs if f.has_leading_dims}
    if not leading:
        pytest.skip("the op has no leading dims")
    case = next(c for c in CASES if c.op is op)
    inputs = {n: v[None][:0] if n in leading else v for n, v in case.inputs().items()}
    expected = fk_numpy(case, inputs)
    arrays = [jnp.asarray(v) for v in inputs.values()]
    for actual, wanted in zip(fk_jax(case)(tuple(inputs), *arrays), expected, strict=True):
        assert_close(actual, wanted, "float32")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("only_first", [False, True])
def test_vmap(case, only_first, device):
    base = case.inputs()
    names, axes = tuple(base), []
    rows = []
    rng = np.random.default_rng(3)
    for i, array in enumerate(base.values()):
        batched = i == 0 or not only_first
        # Indices are repeated, so that they stay in range.
        noise = 0 if array.dtype == np.int32 else rng.normal(size=(3, *array.shape))
        stacked = (array + noise if batched else array).astype(array.dtype)
        if batched and stacked.ndim == array.ndim:
            stacked = np.stack([array] * 3)
        rows.append(stacked)
        # The batch need not stand first.
        axes.append((array.ndim if i == 0 else 0) if batched else None)
    arrays = [
        jnp.asarray(np.moveaxis(r, 0, a) if a is not None else r)
        for r, a in zip(rows, axes, strict=True)
    ]
    batched_call = jax.vmap(lambda *a: fk_jax(case)(names, *a), in_axes=axes)
    outputs = jax.jit(batched_call)(*arrays)
    actual = [np.asarray(o) for o in outputs]
    for k in range(3):
        inputs = {
            n: r[k] if a is not None else r for n, r, a in zip(names, rows, axes, strict=True)
        }
        for a, e in zip(actual, fk_numpy(case, inputs), strict=True):
            assert_close(a[k], np.asarray(e), "float32")


def test_vmap_through_leading_dims_is_one_call():
    x = jnp.ones((4, 3, 8))
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda x: fk.softmax(x, axis=0)))(x))
    assert "scan" not in jaxpr and "while" not in jaxpr


# --- gradients ------------------------------------------------------------------------------------


def scalar_function(case: Case, names: tuple, arrays: list, positions: list[int]):
    """A function of the arrays at `positions` to one number that every output counts in."""

    def function(*chosen):
        given = list(arrays)
        for i, value in zip(positions, chosen, strict=True):
            given[i] = value
        outputs = fk_jax(case)(names, *given)
        return sum(jnp.sum(jnp.cos(o.astype(jnp.float32) + i)) for i, o in enumerate(outputs))

    return function


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_gradient_by_finite_differences(case, device):
    inputs = case.inputs()
    if case.attributes.get("norm") == "layer":
        pytest.skip(
            "few columns over their own spread bend too much; test_output_stage.py has them"
        )
    arrays = [jnp.asarray(v) for v in inputs.values()]
    positions = differentiable_inputs(case, inputs)
    function = jax.jit(scalar_function(case, tuple(inputs), arrays, positions))
    check_grads(
        function,
        [arrays[i] for i in positions],
        order=1,
        modes=["rev"],
        eps=4e-3,
        atol=2e-2,
        rtol=2e-2,
    )


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_gradient_of_each_input_alone(case, device):
    """Asking for one gradient gives what asking for all gives, in any precision."""
    inputs = case.inputs("bfloat16")
    arrays = [jnp.asarray(v) for v in inputs.values()]
    positions = differentiable_inputs(case, inputs)
    function = scalar_function(case, tuple(inputs), arrays, positions)
    chosen = [arrays[i] for i in positions]
    argnums = tuple(range(len(positions)))

    @jax.jit  # one program: most of a test's time is XLA's, for each
    def results(*chosen):
        each = [jax.value_and_grad(function, i)(*chosen) for i in argnums]
        return function(*chosen), jax.grad(function, argnums)(*chosen), each

    without_gradient, everything, each = results(*chosen)
    for array, expected, (value, alone) in zip(chosen, everything, each, strict=True):
        assert alone.dtype == array.dtype and alone.shape == array.shape
        assert_close(alone, np.asarray(expected), "bfloat16")
        assert_close(value, np.asarray(without_gradient), "bfloat16")


@pytest.mark.parametrize("op", [op for op in PUBLIC.values() if op.backward], ids=lambda o: o.name)
def test_gradient_under_vmap(op, device):
    case = next(c for c in reversed(DIFFERENTIABLE) if c.op is op)
    inputs = case.inputs()
    arrays = [jnp.asarray(v) for v in inputs.values()]
    positions = differentiable_inputs(case, inputs)
    gradient = jax.grad(
        scalar_function(case, tuple(inputs), arrays, positions), tuple(range(len(positions)))
    )
    chosen = [arrays[i] for i in positions]
    batch = [jnp.stack([c, c + 0.5]) if i == 0 else c for i, c in enumerate(chosen)]
    axes = [0] + [None] * (len(chosen) - 1)
    batched = jax.jit(jax.vmap(gradient, in_axes=axes))(*batch)
    for k in range(2):
        expected = gradient(batch[0][k], *batch[1:])
        for b, e in zip(batched, expected, strict=True):
            np.testing.assert_allclose(b[k], e, rtol=1e-5, atol=1e-6)


def test_gradient_of_some_inputs_leaves_that_of_all_as_it_was():
    """JAX keeps the trace of a forward for each set of inputs whose gradient is asked."""
    rng = np.random.default_rng(5)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 11), (11,)))

    def loss(x, w):
        return (fk.rms_norm(x, w) * jnp.arange(11.0)).sum()

    first = jax.grad(loss, (0, 1))(x, w)
    for inputs in (1, 0, (0, 1)):
        again = jax.grad(loss, inputs)(x, w)
        for i, gradient in zip(np.atleast_1d(inputs), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(gradient, first[i])


def test_integer_inputs_have_float0_gradients():
    logits, targets = jnp.ones((2, 3)), jnp.array([0, 2])
    _, d_targets = jax.grad(fk.cross_entropy, (0, 1), allow_int=True)(logits, targets)
    assert d_targets.dtype == jax.dtypes.float0


def test_unused_outputs_cost_the_backward_nothing():
    """A gradient that is known to be zero is not an operand, and one not asked for no result."""
    x, w = jnp.ones((4, 8)), jnp.ones(8)
    only_y = jax.make_jaxpr(jax.grad(lambda x: fk.rms_norm(x, w, residual=x)[0].sum()))(x)
    both = jax.make_jaxpr(
        jax.grad(lambda x, w: sum(o.sum() for o in fk.rms_norm(x, w, residual=x)), (0, 1))
    )(x, w)

    def present(jaxpr):
        (line,) = [ln for ln in str(jaxpr).splitlines() if "'rms_norm_bwd'" in ln]
        return int(line.partition("'present', np.int64(")[2].partition(")")[0])

    assert present(only_y).bit_count() == present(both).bit_count() - 2


def test_gradient_in_place_leaves_the_input_alone(device):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32))
    targets = jnp.array([0, 1, 2, 3, -100])
    before = np.array(logits)
    expected = jax.grad(fk.cross_entropy)(logits, targets)
    function = jax.jit(jax.grad(lambda x: fk.cross_entropy(x, targets, inplace_backward=True)))
    np.testing.assert_array_equal(function(logits), expected)
    np.testing.assert_array_equal(logits, before)


def test_second_derivative_is_refused():
    x = jnp.ones((2, 3))
    with pytest.raises(fk.Error, match="softmax: expected a single backward, got a gradient of"):
        jax.grad(lambda x: jax.grad(lambda x: fk.softmax(x).sum())(x).sum())(x)


def test_scan_and_remat(device):
    """Inside control flow and under rematerialisation."""
    x, w = jnp.linspace(-1, 1, 24).reshape(3, 8), jnp.linspace(0.5, 1.5, 8)

    def loop(x, w):
        step = jax.checkpoint(lambda x: fk.rms_norm(x, w) + x)
        return jax.lax.scan(lambda c, _: (step(c), None), x, length=3)[0].sum()

    def unrolled(x, w):
        for _ in range(3):
            x = fk.rms_norm(x, w) + x
        return x.sum()

    for a, b in zip(jax.grad(loop, (0, 1))(x, w), jax.grad(unrolled, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, flashkernel as fk
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
x, w = jnp.linspace(-1, 1, 32).reshape(4, 8), jnp.linspace(0.5, 1.5, 8)
f = jax.shard_map(fk.rms_norm, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
ours = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(f(x, w) ** 3), (0, 1)))(x, w)
whole = jax.value_and_grad(lambda x, w: jnp.sum(fk.rms_norm(x, w) ** 3), (0, 1))(x, w)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, whole)
"""


def test_shard_map():
    """Each device its rows, the gradient of the shared weight summed over all."""
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, env=os.environ | settings
    )
    assert done.returncode == 0, done.stderr


# --- settings and errors --------------------------------------------------------------------------


def test_workspace_that_grows_after_tracing():
    """More threads than when the call was traced may need more workspace."""
    x, w = jnp.ones((512, 64)), jnp.ones(64)
    gradient = jax.jit(jax.grad(lambda w: fk.rms_norm(x, w).sum()))
    threads = fk.num_threads()
    try:
        fk.set_num_threads(1)
        first = gradient(w)
        fk.set_num_threads(4)
        np.testing.assert_allclose(gradient(w), first, rtol=1e-5)
    finally:
        fk.set_num_threads(threads)


def test_numpy_arrays_beside_jax_arrays():
    x = jnp.ones((2, 8))
    assert isinstance(fk.rms_norm(x, np.ones(8, np.float32)), jax.Array)
    with pytest.raises(fk.Error, match="rms_norm: weight: expected a JAX array, got ndarray of"):
        fk.rms_norm(x, np.ones(8, np.float64))


X = jnp.zeros((2, 8))
BAD = {
    "softmax: axis: expected -2 to 1": lambda: fk.softmax(X, axis=2),
    "softmax: axis: expected -2 to 1 ": lambda: fk.softmax(X, axis=-5),
    "softmax: axis: expected an integer, got 'last'": lambda: fk.softmax(X, axis="last"),
    "softmax: x: expected float32, float16 or bfloat16, got int32": lambda: fk.softmax(
        X.astype(jnp.int32)
    ),
    "softmax: x: expected float32, float16 or bfloat16, got bool": lambda: fk.softmax(X > 0),
    "softmax: x: expected float32, float16 or bfloat16, got key": lambda: fk.softmax(
        jax.random.key(0)
    ),
    "rms_norm: weight: expected .*, got key": lambda: fk.rms_norm(X, jax.random.key(0)),
    "rms_norm: weight: expected .*, got object": lambda: fk.rms_norm(X, np.array([None])),
    "rms_norm: weight: expected .*, got <U1": lambda: fk.rms_norm(X, np.array(["a"])),
    r"rms_norm: weight: expected .*, got \[\('a', '<f4'\)\]": lambda: fk.rms_norm(
        X, np.ones(8, [("a", np.float32)])
    ),
    "rms_norm: weight: expected an array that is not masked, got": lambda: fk.rms_norm(
        X, np.ma.ones(8, np.float32)
    ),
    "softmax: axis: expected an integer of 64 bits, got": lambda: fk.softmax(X, axis=2**70),
    "attention: causal: expected True or False, got 'no'": lambda: fk.attention(
        *[X[None, None]] * 3, causal="no"
    ),
    "causal_conv1d_update: state: expected a tensor": lambda: fk.causal_conv1d_update(X, None, X),
    "softmax: x: expected at least 1 dimension": lambda: fk.softmax(jnp.float32(1)),
    r"rms_norm: weight: expected shape \(8,\) to fit x, got \(3,\)": lambda: fk.rms_norm(
        X, X[0, :3]
    ),
    "rms_norm: weight: expected a JAX array, got list": lambda: fk.rms_norm(X, [1.0] * 8),
    "rms_norm: eps: expected a number, got 'small'": lambda: fk.rms_norm(X, eps="small"),
    "rms_norm: residual: expected float32, the dtype of x": lambda: fk.rms_norm(
        X, residual=X.astype(jnp.float16)
    ),
    "cross_entropy: reduction: expected one of 'none', 'mean', 'sum', got 'avg'": (
        lambda: fk.cross_entropy(X, jnp.zeros(2, jnp.int32), reduction="avg")
    ),
    r"cross_entropy: targets: expected shape \(2,\)": lambda: fk.cross_entropy(
        X, jnp.zeros(3, jnp.int32)
    ),
    "rope: inplace: expected False, got True: JAX arrays cannot be": lambda: fk.rope(
        jnp.zeros((1, 2, 1, 4)), X[:, :2], X[:, :2], inplace=True
    ),
    "rope: inplace: expected True or False, got 'no'": lambda: fk.rope(
        jnp.zeros((1, 2, 1, 4)), X[:, :2], X[:, :2], inplace="no"
    ),
    "rope: cos: expected an input that no gradient is asked of": lambda: jax.grad(
        lambda cos: fk.rope(jnp.zeros((1, 2, 1, 4)), cos, X[:, :2]).sum()
    )(X[:, :2]),
    "causal_conv1d_update: state: expected an input that no gradient is asked of": lambda: jax.grad(
        lambda state: fk.causal_conv1d_update(X[:, :4], state, jnp.ones((4, 3)))[0].sum()
    )(jnp.ones((2, 2, 4))),
    "causal_conv1d: weight: expected 2 to 8 taps": lambda: fk.causal_conv1d(
        X[None], jnp.ones((8, 0)), return_final_state=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_argument(message):
    with pytest.raises(fk.Error, match=message):
        BAD[message]()


def test_bad_data_on_the_cpu():
    text = (
        "cross_entropy: targets: expected values from 0 to 7 or ignore_index=-100, got 8 at row 1"
    )
    with jax.default_device(DEVICES[0]):
        logits, targets = jnp.zeros((2, 8)), jnp.array([0, 8])
        with pytest.raises(fk.Error, match=text):
            fk.cross_entropy(logits, targets)
        with pytest.raises(Exception, match=text):
            jax.jit(fk.cross_entropy)(logits, targets).block_until_ready()


def test_signatures_are_the_declarations():
    for name, op in PUBLIC.items():
        assert getattr(fk.jax, name).__doc__ == op.docstring


def test_structs_are_laid_out_as_xla_does():
    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not header.exists():
        pytest.skip("needs a C++ compiler and jaxlib's headers")
    source = pathlib.Path(__file__).with_name("xla_layout.cc")
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT}", f"-I{jax.ffi.include_dir()}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

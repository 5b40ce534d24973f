"""PackedLinear: a linear layer whose weight is packed once, in three dtypes, on every instruction
set that this machine has."""

import concurrent.futures
import copy
import os
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import flashkernel as fk
import software_gpu
from harness import DTYPES, LAYOUTS, assert_close, lay_out, normal, raises, seeded
from test_linear import ACTIVATIONS

pytestmark = pytest.mark.skipif(software_gpu.ON, reason="runs on the CPU alone")

# Every number of rows that takes tiles of its own, one block and more, panels that are not full.
SHAPES = [
    (1, 96, 72),
    (2, 33, 200),
    (3, 1, 13),
    (6, 64, 256),
    (16, 130, 700),
    (37, 50, 41),
    (97, 531, 257),
    (300, 70, 2100),
    (1, 1, 1),
    (0, 8, 8),
    (4, 0, 8),
    (4, 8, 0),
]
PACKED = ("float32", "bfloat16", "int8")
TARGETS = fk.build_info()["cpu_targets"].split(", ")


def draw(rows, columns, depth, dtype="float32"):
    g = seeded("packed", rows, columns, depth)
    x = normal(g, rows, depth).to(getattr(torch, dtype))
    weight = normal(g, columns, depth, scale=max(depth, 1) ** -0.5).float()
    return x, weight, normal(g, columns).float()


def quantized(t):
    """Rows rounded to 127 steps on either side of 0, as an int8 layer has them."""
    scale = t.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (t / scale).round().clamp(-127, 127) * scale


def exact(x, weight, bias, kept, activation=None):
    """The layer in float64, on the numbers that it multiplies."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    if kept == "int8" and x.numel() and weight.numel():
        # Scales are float32.
        x, weight = quantized(x.float()).double(), quantized(weight.float()).double()
    if kept == "bfloat16":
        weight = weight.bfloat16().double()
    return ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))


@pytest.fixture(params=TARGETS)
def target(request):
    fk.set_cpu_target(request.param)
    yield request.param
    fk.set_cpu_target(os.environ.get("FK_CPU_TARGET"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kept", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dtype, kept, shape, target):
    x, weight, bias = draw(*shape, dtype)
    layer = fk.PackedLinear(weight, bias, dtype=kept)
    want = exact(x, weight, bias, kept)
    same = torch.nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    # A product of bfloat16 numbers may round x as well. A number halfway between two codes may
    # become either.
    least = {"float32": 0, "bfloat16": 2**-7, "int8": 2**-7}[kept]
    assert_close(layer(x), want, same, dtype, 2.0, f"{kept} {target}", least)


@pytest.mark.parametrize("kept", PACKED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, kept):
    x, weight, bias = draw(20, 48, 64)
    got = fk.PackedLinear(weight, bias, dtype=kept, activation=activation)(x)
    torch.testing.assert_close(
        got.double(), exact(x, weight, bias, kept, activation), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("kept", PACKED)
def test_packed_by_one_target_called_by_another(kept):
    """Panels are as wide as the tiles of the instruction set that packed them."""
    x, weight, bias = draw(13, 150, 301)
    try:
        for packs in TARGETS:
            fk.set_cpu_target(packs)
            layer = fk.PackedLinear(weight, bias, dtype=kept)
            for calls in TARGETS:
                fk.set_cpu_target(calls)
                torch.testing.assert_close(
                    layer(x).double(), exact(x, weight, bias, kept), rtol=0.02, atol=0.02
                )
    finally:
        fk.set_cpu_target(os.environ.get("FK_CPU_TARGET"))


def test_int8_is_exact():
    """Integer sums are the same on every instruction set, with VNNI and without."""
    script = (
        "import numpy as np, flashkernel as fk, hashlib\n"
        "r = np.random.default_rng(0)\n"
        "w = r.integers(-127, 128, (150, 333)).astype(np.float32)\n"
        "w[:, 0] = 127\n"
        "x = r.integers(-127, 128, (23, 333)).astype(np.float32)\n"
        "x[:, 0] = 127\n"
        "layer = fk.PackedLinear(w, dtype='int8')\n"
        "assert (layer(x) == x.astype(np.int64) @ w.T.astype(np.int64)).all()\n"
        "one = layer(x[:1])\n"
        "assert (one == layer(x)[:1]).all()\n"
    )
    for name in TARGETS:
        for vnni in ("0", "1"):
            environment = {**os.environ, "FK_CPU_TARGET": name, "FK_CPU_VNNI": vnni}
            subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", PACKED)
def test_strides(kept, layout):
    x, weight, bias = draw(24, 40, 72)
    x, weight, bias = (lay_out(t, layout) for t in (x.view(2, 12, 72), weight, bias))
    got = fk.PackedLinear(weight, bias, dtype=kept)(x)
    assert got.shape == (2, 12, 40)
    torch.testing.assert_close(got.double(), exact(x, weight, bias, kept), rtol=0.02, atol=0.02)
    wide = torch.randn(5, 9, 72)[:, 2:6].transpose(0, 1)  # rows that no single stride reaches
    torch.testing.assert_close(
        fk.PackedLinear(weight, dtype=kept)(wide),
        fk.PackedLinear(weight, dtype=kept)(wide.contiguous()),
    )


@pytest.mark.parametrize("kept", PACKED)
def test_kinds_of_arrays(kept):
    x, weight, bias = draw(4, 24, 32)
    layer = fk.PackedLinear(weight.numpy(), bias.numpy(), dtype=kept)
    want = layer(x)
    assert isinstance(want, torch.Tensor)
    assert (layer(x.numpy()) == want.numpy()).all()
    half = layer(x.numpy().astype(ml_dtypes.bfloat16))
    assert half.dtype == ml_dtypes.bfloat16
    assert layer(x[0]).shape == (24,)
    jax = pytest.importorskip("jax")
    got = layer(jax.numpy.asarray(x.numpy()))
    assert isinstance(got, jax.Array)
    assert (np.asarray(got) == want.numpy()).all()
    with raises("PackedLinear: x: .*got a traced one"):
        jax.jit(layer)(jax.numpy.asarray(x.numpy()))


def test_what_it_says():
    weight = torch.randn(24, 32)
    assert fk.PackedLinear(weight).dtype == "float32"
    assert fk.PackedLinear(weight.half()).dtype == "float32"
    layer = fk.PackedLinear(weight.bfloat16(), activation="silu")
    assert repr(layer) == "<flashkernel.PackedLinear in=32, out=24, bfloat16, silu>"
    sizes = [fk.PackedLinear(weight, dtype=d).nbytes for d in PACKED]
    assert sizes == [32 * 32 * 4, 32 * 32 * 2, 32 * 32 + 32 * 4]  # 24 columns fill up to 32


def test_the_weight_is_copied():
    weight = torch.randn(24, 32)
    layer, x = fk.PackedLinear(weight), torch.randn(2, 32)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


def test_numbers_that_are_not_finite():
    x = torch.randn(3, 32)
    x[1, 4] = float("inf")
    x[2, 5] = float("nan")
    got = fk.PackedLinear(torch.ones(8, 32), dtype="int8")(x)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1:]).all()
    with raises("PackedLinear: weight: expected finite numbers for int8"):
        fk.PackedLinear(x, dtype="int8")
    assert torch.isnan(fk.PackedLinear(x, dtype="bfloat16")(torch.ones(1, 32))[0, 2])
    tiny = torch.full((1, 32), 1e-44)
    assert (fk.PackedLinear(torch.ones(8, 32), dtype="int8")(tiny) == 0).all()


def test_many_threads():
    weight, x = torch.randn(200, 300), torch.randn(40, 300)
    layer = fk.PackedLinear(weight, dtype="int8")
    want = layer(x)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: layer(x), range(40)):
            assert torch.equal(got, want)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    with raises("PackedLinear: cannot be copied or pickled, .*make it again, from its weight"):
        duplicate(fk.PackedLinear(np.ones((4, 4), np.float32)))


def test_errors():
    weight = np.ones((5, 8), np.float32)
    layer = fk.PackedLinear(weight)
    with raises(r"PackedLinear: x: expected shape \(\.\.\., 8\) to fit the weight, got \(2, 7\)"):
        layer(np.ones((2, 7), np.float32))
    with raises(r"PackedLinear: x: expected shape \(\.\.\., 8\) to fit the weight, got \(\)"):
        layer(np.ones((), np.float32))
    with raises("PackedLinear: x: expected float32, float16 or bfloat16, got float64"):
        layer(np.ones((2, 8)))
    with raises("PackedLinear: x: expected a NumPy array, torch tensor or JAX array, got list"):
        layer([1.0] * 8)
    with raises(r"PackedLinear: weight: expected shape \(out, in\), got \(8,\)"):
        fk.PackedLinear(weight[0])
    with raises(r"PackedLinear: bias: expected shape \(5,\) to fit weight, got \(4,\)"):
        fk.PackedLinear(weight, np.ones(4, np.float32))
    with raises("PackedLinear: dtype: expected one of .* got 'int4'"):
        fk.PackedLinear(weight, dtype="int4")
    with raises("PackedLinear: activation: expected one of linear's, got swish"):
        fk.PackedLinear(weight, activation="swish")
    with raises("PackedLinear: weight: expected at most 131072 columns for int8"):
        fk.PackedLinear(np.ones((1, 131073), np.float32), dtype="int8")
    with raises("PackedLinear: weight: expected a tensor on the CPU .* got one on meta"):
        fk.PackedLinear(torch.ones(5, 8, device="meta"))
    with raises("PackedLinear: x: expected a tensor that requires no gradient"):
        layer(torch.ones(2, 8, requires_grad=True))
    with torch.no_grad():
        layer(torch.ones(2, 8, requires_grad=True))

"""scaled_linear: a linear layer of numbers that have scales, 8-bit floats above all.

The bar is the formula in float64 on the same inputs. Beside the rounding of the output, a kernel
may round each operand to the output's dtype once it has its scale (the portable CUDA kernels do),
and tensor cores add up products of 8-bit floats with about 14 bits (Hopper's do, 128 at a time):
both are bounded by the same sum over the magnitudes of its terms."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    LAYOUTS,
    TORCH_BACKENDS,
    convert,
    lay_out,
    raises,
    seeded,
    to_float64,
)
from test_linear import ACTIVATIONS

FLOAT8 = torch.float8_e4m3fn
DTYPES = {"float8": FLOAT8, "float32": torch.float32, "bfloat16": torch.bfloat16}
# One rounding of a result, and of a term of its sum.
STEP = {"float8": 2.0**-8, "float32": 2.0**-21, "bfloat16": 2.0**-8}
TERM = {"float8": 2.0**-9, "float32": 2.0**-21, "bfloat16": 2.0**-9}
SCALES = ("one", "rows", "blocks")


def blocks(size):
    return -(-size // 128)


def spread(scale, rows, columns):
    """Scales of blocks for each element."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def moved(t, backend):
    """convert, for a dtype that few of torch's own functions take."""
    if t.dtype != FLOAT8:
        return convert(t, backend)
    if backend.startswith("torch"):
        return convert(t.view(torch.uint8), backend).view(FLOAT8)
    import ml_dtypes

    array = t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if backend == "numpy":
        return array
    import jax

    return jax.device_put(array, jax.devices("gpu" if backend == "jax_cuda" else "cpu")[0])


def drawn(leading, n, k, dtype, x_kind, weight_kind):
    """The inputs, and x and weight in float64 with their scales."""
    generator = seeded(leading, n, k, dtype, x_kind, weight_kind)

    def positive(*shape):
        return 0.25 + torch.rand(shape, generator=generator)

    x = torch.randn(*leading, k, generator=generator).to(DTYPES[dtype])
    weight = (torch.randn(n, k, generator=generator)).to(DTYPES[dtype])
    x_scale = {
        "one": lambda: positive(1),
        "rows": lambda: positive(*leading, 1),
        "blocks": lambda: positive(*leading, blocks(k)),
    }[x_kind]()
    weight_scale = {
        "one": lambda: positive(1),
        "rows": lambda: positive(n, 1),
        "blocks": lambda: positive(blocks(n), blocks(k)),
    }[weight_kind]()
    by_x, by_weight = x_scale.double(), weight_scale.double()
    if x_kind == "blocks":
        by_x = by_x.repeat_interleave(128, -1)[..., :k]
    if weight_kind == "blocks":
        by_weight = spread(by_weight, 128, 128)[:n, :k]
    tensors = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": weight_scale}
    return tensors, x.double() * by_x, weight.double() * by_weight, generator


def check(backend, leading, n, k, dtype="float8", kinds=("one", "one"), layout="contiguous",
          activation=None, extras=None):  # fmt: skip
    """`extras`: the dtype of bias and residual, None: there are none."""
    tensors, x, weight, generator = drawn(leading, n, k, dtype, *kinds)
    for name in ("x", "weight"):
        tensors[name] = lay_out(tensors[name].view(torch.uint8), layout).view(FLOAT8) if (
            dtype == "float8"
        ) else lay_out(tensors[name], layout)  # fmt: skip
    bias = residual = torch.zeros(())
    if extras is not None:
        bias = torch.randn(n, generator=generator).to(extras)
        residual = torch.randn(*leading, n, generator=generator).to(extras)
        tensors |= {"bias": bias, "residual": residual}
    before = x @ weight.T + bias.double()
    terms = x.abs() @ weight.abs().T + bias.double().abs()
    want = ACTIVATIONS[activation](before) + residual.double()
    got = fk.scaled_linear(**{n: moved(t, backend) for n, t in tensors.items()},
                           activation=activation)  # fmt: skip
    result = "bfloat16" if dtype == "float8" else dtype
    assert str(got.dtype).removeprefix("torch.") == result
    got = to_float64(got)
    assert got.shape == want.shape
    if not got.numel():
        return
    # No activation used here is steeper than 1.2.
    allowed = STEP[dtype] * (want.abs() + residual.double().abs()) + 1.2 * TERM[dtype] * terms
    error = (got - want).abs()
    assert bool((error <= allowed + 1e-30).all()), f"{(error / allowed).max():.2f} times the bar"


@pytest.mark.parametrize("kinds", [(a, b) for a in SCALES for b in SCALES], ids="-".join)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales(backend, kinds):
    check(backend, (37,), 272, 400, kinds=kinds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, dtype):
    check(backend, (5, 3), 40, 136, dtype, ("blocks", "blocks"))


SIZES = [((1,), 1, 1), ((1,), 300, 768), ((0,), 4, 8), ((4,), 0, 8), ((4,), 5, 0), ((), 7, 33),
         ((2, 0, 3), 5, 8), ((3, 2, 5), 131, 129), ((129,), 127, 128), ((200,), 130, 1031),
         ((16,), 256, 512), ((9,), 136, 1160), ((33,), 70, 2200), ((64,), 24, 4224)]  # fmt: skip


@pytest.mark.parametrize("kinds", [("one", "rows"), ("blocks", "blocks")], ids="-".join)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes(backend, size, kinds):
    if not size[0]:  # a row alone has one scale
        kinds = ("one", kinds[1])
    check(backend, *size, kinds=kinds)


@pytest.mark.parametrize("kinds", [("one", "rows"), ("blocks", "blocks")], ids="-".join)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_more_tiles_than_multiprocessors(backend, kinds):
    """On Hopper tiles of 256 rows, two to a block."""
    check(backend, (1000,), 8400, 160, kinds=kinds, extras=torch.bfloat16)


@pytest.mark.parametrize("extras", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "relu", "sigmoid"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_epilogue(backend, activation, extras):
    check(backend, (70,), 144, 256, kinds=("rows", "blocks"), activation=activation, extras=extras)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout):
    check(backend, (3, 11), 48, 160, kinds=("blocks", "blocks"), layout=layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_larger_than_a_chunk(backend):
    check(backend, (300,), 300, 2064, kinds=("blocks", "blocks"))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_every_value(backend):
    """All 256 codes of a byte, each times 1, come back."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    one, ones = torch.ones(1, 1).to(FLOAT8), torch.ones(1)
    got = fk.scaled_linear(
        moved(codes[:, None], backend), moved(one, backend), *(moved(ones, backend),) * 2
    )
    torch.testing.assert_close(
        to_float64(got)[:, 0], codes.double(), rtol=0, atol=0, equal_nan=True
    )


def test_compiled():
    tensors, *_ = drawn((20,), 48, 256, "float8", "blocks", "blocks")
    compiled = torch.compile(lambda *a: fk.scaled_linear(*a), fullgraph=True)
    arguments = tuple(tensors.values())
    assert compiled(*arguments).equal(fk.scaled_linear(*arguments))


def test_errors():
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    x, weight, one = zeros(4, 300), zeros(200, 300), zeros(1)
    with raises(r"scaled_linear: x_scale: expected 1 or 3 scales for each row, got 2"):
        fk.scaled_linear(x, weight, zeros(4, 2), one)
    with raises(r"scaled_linear: x_scale: expected shape \(1,\) or \(4, X\)"):
        fk.scaled_linear(x, weight, zeros(3, 1), one)
    with raises(r"scaled_linear: weight_scale: expected shape \(1\), \(200, 1\) or \(2, 3\)"):
        fk.scaled_linear(x, weight, one, zeros(2, 2))
    with raises(r"scaled_linear: weight: expected shape \(200, 300\)"):
        fk.scaled_linear(x, zeros(200, 299), one, one)
    x8 = torch.zeros(4, 8).to(FLOAT8)
    with raises(r"scaled_linear: weight: expected float8_e4m3fn, the dtype of x, got float32"):
        fk.scaled_linear(x8, torch.zeros(3, 8), torch.ones(1), torch.ones(1))

"""What the matrix products on CUDA count, held to the least that their tiles allow: products of the
tensor cores, bytes of global memory with each operand read once for each row or column of tiles,
and no bank conflicts in the main loop."""

import os

import pytest
import torch

import flashkernel as fk
import software_gpu
from flashkernel.bench.softgpu.count import readable

ARCH = int(os.environ.get("FK_SOFTGPU_ARCH", "0"))
pytestmark = pytest.mark.skipif(not ARCH, reason="counts on the software GPU")

SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# Products of float are six of the tensor cores each, of three bfloat16 numbers.
TIMES = {"float32": 6, "float16": 1, "bfloat16": 1}
# Enough tiles of 128 x 128 for each chip's multiprocessors.
LARGE = {75: 896, 80: 1408, 90: 1536}.get(ARCH)

with_tensor_cores = pytest.mark.parametrize(
    "dtype", ["float16"] if ARCH == 75 else ["float16", "bfloat16", "float32"]
)


def counted(function, *names):
    """The launches of kernels so named, in order."""
    with software_gpu.launches() as made:
        function()
    return [
        (readable(launch["name"]), launch["counters"])
        for launch in made
        if any(name in launch["name"] for name in names)
    ]


def conflicts(counters):
    """Passes over the banks past those that the accesses need."""
    return counters["shared_load_conflicts"] + counters["shared_store_conflicts"]


def tile_of(kernel, dtype):
    if "matrix_product" in kernel:
        return (128, 192) if "Wide" in kernel else (128, 128)
    if "Large" in kernel:
        return (128, 64) if dtype == "float32" else (128, 128)
    return 64, 64


def draw(m, n, k, dtype):
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    return (
        torch.randn(m, k, generator=generator).to(kind),
        torch.randn(n, k, generator=generator).to(kind),
    )


def check(kernel, counters, m, n, k, dtype, results=1):
    """A product of (m, k) and (n, k), which has so many results as large as m n."""
    rows, columns = tile_of(kernel, dtype)
    assert m % rows == 0 and n % columns == 0, f"{kernel}: sizes are no multiples of its tile"
    least = 2 * m * n * k * TIMES[dtype]
    assert least <= counters["tensor_flops"] <= 1.02 * least, kernel
    read = (n // columns * m * k + m // rows * n * k) * SIZE[dtype]
    assert read <= counters["global_load_bytes"] <= 1.1 * read, kernel
    assert counters["global_store_bytes"] <= 1.1 * results * m * n * SIZE[dtype], kernel


@with_tensor_cores
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_product(large, dtype):
    size, k = (LARGE, 64) if large else (384, 128)
    if ARCH == 90 and dtype != "float32":
        size = 384
    x, weight = draw(size, size, k, dtype)
    ((kernel, counters),) = counted(lambda: fk.linear(x, weight), "product")
    if ARCH != 90 or dtype == "float32":
        assert ("Large" in kernel) == large
    check(kernel, counters, size, size, k, dtype)
    assert conflicts(counters) == 0, kernel


@with_tensor_cores
def test_backward(dtype):
    """Operands that lie across the other way."""
    m, n, k = 256, 384, 128
    x, weight = draw(m, n, k, dtype)
    y = fk.linear(x.requires_grad_(), weight.requires_grad_())
    dy = torch.ones_like(y)
    dx, dweight = counted(lambda: y.backward(dy), "product")
    check(*dx, m, k, n, dtype)
    check(*dweight, n, k, m, dtype)
    assert conflicts(dx[1]) == conflicts(dweight[1]) == 0


@with_tensor_cores
def test_gated(dtype):
    """Both weights side by side: one pass over x for two products."""
    m, n, k = 256, 128, 128
    x, weight = draw(m, 2 * n, k, dtype)
    with torch.no_grad():
        ((kernel, counters),) = counted(lambda: fk.gated_linear(x, weight), "product")
    rows, columns = tile_of(kernel, dtype)
    assert m % rows == 0 and 2 * n % columns == 0
    least = 4 * m * n * k * TIMES[dtype]
    assert least <= counters["tensor_flops"] <= 1.02 * least
    read = (2 * n // columns * m * k + m // rows * 2 * n * k) * SIZE[dtype]
    assert counters["global_load_bytes"] <= 1.1 * read
    assert counters["global_store_bytes"] == m * n * SIZE[dtype]


@with_tensor_cores
def test_main_loop_has_no_conflicts_whatever_its_length(dtype):
    """Those of a gate's epilogue are the same for any K."""
    found = []
    for k in (64, 256):
        x, weight = draw(128, 256, k, dtype)
        with torch.no_grad():
            ((_, counters),) = counted(lambda x=x, w=weight: fk.gated_linear(x, w), "product")
        found.append(conflicts(counters))
    assert found[0] == found[1]


@with_tensor_cores
@pytest.mark.parametrize("rows", [1, 8, 16, 24])
def test_few_rows(rows, dtype):
    """The weight is read once; x once for each 16 of its rows, on Hopper for each 64."""
    hopper = ARCH == 90 and dtype != "float32"
    if rows > 16 and not hopper:
        pytest.skip("takes tiles")
    n, k = 4096, 256
    x, weight = draw(rows, n, k, dtype)
    ((kernel, counters),) = counted(lambda: fk.linear(x, weight), "product")
    assert "few_rows" in kernel
    room = (rows + 7) // 8 * 8 if not hopper else 16 if rows <= 16 else 32
    assert counters["tensor_flops"] == 2 * room * n * k * TIMES[dtype]
    together = 64 if hopper else 16
    read = (n * k + n // together * rows * k) * SIZE[dtype]
    assert counters["global_load_bytes"] == read
    assert counters["global_store_bytes"] == rows * n * SIZE[dtype]


@with_tensor_cores
def test_parts_of_k(dtype):
    """Few tiles and a long K: parts are stored and added up, each once."""
    m, n, k = 128, 128, 8192
    x, weight = draw(m, n, k, dtype)
    (_, product), (_, sums) = counted(lambda: fk.linear(x, weight), "product", "add_splits")
    assert product["tensor_flops"] == 2 * m * n * k * TIMES[dtype]
    parts, rest = divmod(product["global_store_bytes"], m * n * 4)
    assert parts > 1 and rest == 0
    assert sums["global_load_bytes"] == parts * m * n * 4
    y = fk.linear(x, weight)
    assert torch.equal(y, fk.linear(x, weight))


def launched_with_norm(dtype, m, n, k, norm, repeats=1):
    """The kernels of a linear layer with a norm; the norm's own among them is a launch behind."""
    if ARCH == 90 and dtype != "float32":
        pytest.skip("Hopper's own kernels have the norm behind them")
    x, weight = draw(m, n, k, dtype)
    scale, shift = torch.rand(n) + 0.5, torch.randn(n)
    options = {"norm_weight": scale, "norm_eps": 1e-5}
    if norm == "layer":
        options |= {"norm": norm, "norm_bias": shift}
    with software_gpu.launches() as made:
        first = fk.linear(x, weight, **options)
    for _ in range(repeats):
        for a, b in zip(first, fk.linear(x, weight, **options), strict=True):
            assert torch.equal(a, b)
    normed, y = first
    layer_norm = torch.nn.functional.layer_norm
    expected = (
        layer_norm(y.float(), (n,), scale, shift, 1e-5)
        if norm == "layer"
        else torch.nn.functional.rms_norm(y.float(), (n,), scale, 1e-5)
    )
    torch.testing.assert_close(normed, expected.to(normed.dtype), rtol=1e-2, atol=1e-2)
    return [readable(launch["name"]) for launch in made]


@pytest.fixture
def watched():
    """Looks for races: a block that does not wait for the others may find their results by luck."""
    software_gpu.schedule(0, True)
    yield
    seed, races = (os.environ.get(f"FK_SOFTGPU_{name}", "0") for name in ("SEED", "RACES"))
    software_gpu.schedule(int(seed), races == "1")


@with_tensor_cores
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_few_rows_are_normalised_in_the_same_launch(m, norm, dtype, watched):
    (kernel,) = launched_with_norm(dtype, m, 256, 128, norm, repeats=2)
    assert "product_of_few_rows" in kernel


@with_tensor_cores
@pytest.mark.parametrize("m", [4, 40])
def test_parts_of_k_are_normalised_where_they_are_added(m, dtype):
    _, last = launched_with_norm(dtype, m, 64, 8192, "layer")
    assert "add_splits_and_normalise" in last


@with_tensor_cores
def test_longer_rows_are_normalised_behind(dtype):
    """A warp holds no more than 8 vectors a lane."""
    columns = 256 * 16 // SIZE[dtype] + 16
    product, norm = launched_with_norm(dtype, 3, columns, 64, "rms")
    assert "product_of_few_rows" in product
    assert "norm::forward" in norm

"""What ssd's kernels count on a chip that they fill, held to the formula: operations of the tensor
cores, and bytes that memory must deliver, of which each launch counts what it touches once.

A token of H heads that share B and C in G groups, in chunks of Q steps, takes G Q N operations for
C B^T and H (Q P + 4 P N) for what follows: half of the chunk's products lies above the diagonal and
is not needed. The least bytes are the call's tensors, each once. Sequences here are too short to be
cut into walks, of which the states would be computed twice."""

import os

import pytest
import torch

import flashkernel as fk
import software_gpu

ARCH = int(os.environ.get("FK_SOFTGPU_ARCH", "0"))
pytestmark = pytest.mark.skipif(not ARCH, reason="counts on the software GPU")

MULTIPROCESSORS = {75: 40, 80: 108, 90: 132}.get(ARCH)
# Products of float are six of the tensor cores each, of three bfloat16 numbers.
TIMES = {"float32": 6, "float16": 1, "bfloat16": 1}
CHUNK = 64  # of the formula, and the kernels' own but for the forward in float32
TRIANGLE = 10 * 16 * 16  # numbers in a chunk's squares of 16 x 16 up to the diagonal

# The kernels for any strides and sizes; from sm_80 on those for whole vectors take 16-bit calls.
with_tensor_cores = pytest.mark.parametrize("dtype", ["float16" if ARCH == 75 else "float32"])
in_vectors = pytest.mark.skipif(ARCH == 75, reason="Turing has no kernels for whole vectors")
# Batch, length, heads, groups, channels, states.
SHAPES = [
    (6, 384, 24, 1, 64, 128),
    (6, 768, 24, 1, 64, 64),
    (6, 192, 12, 2, 128, 128),
    (72, 64, 16, 1, 64, 16),
]
with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def draw(b, length, heads, groups, p, n, dtype):
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "x": normal(b, length, heads, p).to(kind),
        "dt": normal(b, length, heads).to(kind),
        "A": -torch.rand(heads, generator=generator),
        "B": normal(b, length, groups, n).to(kind),
        "C": normal(b, length, groups, n).to(kind),
        "D": normal(heads),
        "dt_bias": normal(heads),
    }


def counted(function, blocks_of, at_least_one=False):
    """The counters of each launch; `blocks_of` names the one that must fill the chip, or more."""
    with software_gpu.launches() as made:
        function()
    filling = [launch["grid"] for launch in made if blocks_of in launch["name"]]
    assert len(filling) == 1 or (at_least_one and filling)
    assert all(grid[0] * grid[1] >= MULTIPROCESSORS for grid in filling)
    return [launch["counters"] for launch in made]


def total(made, name):
    return sum(counters[name] for counters in made)


def bytes_of(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@with_tensor_cores
@with_shapes
def test_forward(shape, dtype):
    b, length, heads, groups, p, n = shape
    t = draw(*shape, dtype)
    made = counted(lambda: fk.ssd(**t, dt_softplus=True), "walk_chunks")
    flops, moved = total(made, "tensor_flops"), total(made, "global_unique_bytes")

    per_token = groups * CHUNK * n + heads * (CHUNK * p + 4 * p * n)
    assert flops <= 1.1 * TIMES[dtype] * b * length * per_token
    least = bytes_of(*t.values()) + bytes_of(t["x"])
    assert least <= moved <= 1.3 * least

    # What the tiles say: squares on the diagonal are multiplied whole, a tile's states all, and the
    # first chunk has no state to multiply, the last one none to make.
    steps = 32 if dtype == "float32" else 64
    triangle = (steps // 16) * (steps // 16 + 1) // 2 * 256
    chunks, states = length // steps, max(n, 32)
    with_states = 2 * (chunks - 1) * steps * states
    per_head = 2 * p * (chunks * triangle + with_states)
    shared = chunks > 1
    scores = (groups if shared else heads) * chunks * 2 * triangle * states
    assert flops == TIMES[dtype] * b * (heads * per_head + scores)
    # C B^T is kept in float where blocks share it, by a launch that reads B and C once more.
    kept = bytes_of(t["B"], t["C"]) + 2 * 4 * b * groups * chunks * triangle
    assert moved == pytest.approx(least + kept * shared, rel=0.01)


@with_tensor_cores
@with_shapes
def test_backward(shape, dtype):
    """Tensor cores do no more than the formula says. Memory moves up to 4.1 times the least: what
    each chunk begins with and the gradient of what it ends with, P N numbers each, are written by
    one launch and read by the next, eight times the size of x at 128 states of 64 steps, so that dB
    and dC can be summed over heads by a block that has one chunk; x and dy are read by both."""
    b, length, heads, groups, p, n = shape
    t = draw(*shape, dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in t.items()}
    y = fk.ssd(**leaves, dt_softplus=True)
    dy = torch.ones_like(y)
    made = counted(lambda: torch.autograd.grad(y, list(leaves.values()), dy), "backward_chunks")
    flops = total(made, "tensor_flops")
    # Two of the products with x, and five with the state, of which one is the forward's again.
    per_token = groups * 3 * CHUNK * n + heads * (2 * CHUNK * p + 10 * p * n)
    assert flops <= 1.1 * TIMES[dtype] * b * length * per_token

    chunks, tiles = length // CHUNK, -(-n // 64)
    all_chunks, size = b * chunks, y.element_size()
    states = 2 * all_chunks * heads * p * n * size
    products = 4 * all_chunks * groups * TRIANGLE
    # What steps are worth, chunks' decays, and parts of dD.
    worth = 4 * all_chunks * heads * ((2 + 2 * tiles) * CHUNK + tiles + p)
    x, dt, B, C, numbers = (bytes_of(*ts) for ts in (
        (t["x"],), (t["dt"],), (t["B"],), (t["C"],), (t["A"], t["D"], t["dt_bias"])))  # fmt: skip
    # The last chunk's x and the first one's dy make no state.
    walked = 2 * x * (chunks - 1) // chunks + (dt if chunks > 1 else 0)
    expected = [
        walked + B + C + states + products,
        3 * x + dt + 2 * (B + C) + states + products + worth,
        worth + 2 * dt + 2 * numbers,
    ]
    assert [c["global_unique_bytes"] for c in made] == pytest.approx(expected, rel=0.01)
    least = 2 * bytes_of(*leaves.values()) + bytes_of(dy)
    assert sum(expected) <= 4.1 * least


@in_vectors
@with_shapes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_forward_in_vectors(shape, dtype):
    """Decays and C B^T are made by a launch of their own and read by the walks: 1.34 times the
    least bytes. A sequence that is cut into walks is read twice: 1.78 times."""
    b, length, heads, groups, p, n = shape
    t = draw(*shape, dtype)
    made = counted(lambda: fk.ssd(**t, dt_softplus=True), "walk_vectors", at_least_one=True)
    flops, moved = total(made, "tensor_flops"), total(made, "global_unique_bytes")
    per_token = groups * CHUNK * n + heads * (CHUNK * p + 4 * p * n)
    cut = len(made) > 2
    assert flops <= (1.2 if cut else 1.0) * b * length * per_token
    least = bytes_of(*t.values()) + bytes_of(t["x"])
    assert least <= moved <= (1.8 if cut else 1.36) * least


@in_vectors
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[4] == 64], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backward_in_vectors(shape, dtype):
    """These kernels trade operations and bytes for fewer instructions: h C^T is multiplied once
    more, so that dB and dC are sums over heads without a factor between them, and states, decays
    and what they are worth are kept for each chunk. On an H200 that takes a seventh of the
    time."""
    b, length, heads, groups, p, n = shape
    t = draw(*shape, dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in t.items()}
    y = fk.ssd(**leaves, dt_softplus=True)
    dy = torch.ones_like(y)
    gradients = lambda: torch.autograd.grad(y, list(leaves.values()), dy)  # noqa: E731
    made = counted(gradients, "vector_inputs", at_least_one=True)
    per_token = groups * 3 * CHUNK * n + heads * (2 * CHUNK * p + 10 * p * n)
    assert total(made, "tensor_flops") <= 1.6 * b * length * per_token
    least = 2 * bytes_of(*leaves.values()) + bytes_of(dy)
    assert least <= total(made, "global_unique_bytes") <= 8.2 * least

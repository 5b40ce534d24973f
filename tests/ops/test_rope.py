"""rope."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    WITH_GRADIENTS,
    Case,
    check_finite_differences,
    convert,
    normal,
    raises,
    run_forward,
    run_gradients,
)


def formula(interleaved):
    def call(x, cos, sin, positions=None):
        length, rotated = x.shape[1], 2 * cos.shape[1]
        if positions is None:
            positions = torch.arange(length)
        c, s = cos[positions.long()], sin[positions.long()]  # (L, R) or (B, L, R)
        c, s = c.unsqueeze(-2), s.unsqueeze(-2)
        first, rest = x[..., :rotated], x[..., rotated:]
        if interleaved:
            a, b = first[..., ::2], first[..., 1::2]
            turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
        else:
            a, b = first.chunk(2, -1)
            turned = torch.cat([a * c - b * s, b * c + a * s], -1)
        return torch.cat([turned, rest], -1).to(x.dtype)

    return call


def rope_case(
    shape, rotated=None, positions=None, interleaved=False, table=None, index=torch.int64
):
    b, length, _, d = shape
    half = (d if rotated is None else rotated) // 2
    table = length + 3 if table is None else table

    def inputs(g):
        angle = torch.arange(table)[:, None] * 100.0 ** (-torch.arange(half) / max(half, 1))
        out = {
            "x": normal(g, *shape),
            "cos": torch.cos(angle.double()),
            "sin": torch.sin(angle.double()),
        }
        if positions == "L":
            out["positions"] = torch.randint(0, table, (length,), generator=g).to(index)
        elif positions == "BL":
            out["positions"] = torch.randint(0, table, (b, length), generator=g).to(index)
        return out

    return Case(
        f"rope[{'x'.join(map(str, shape))},R={half},{positions},{interleaved},{index}]",
        "rope",
        inputs,
        formula(interleaved),
        {"interleaved": interleaved},
        ("cos", "sin"),
        ("x",),
    )


CASES = [
    rope_case(shape, rotated, positions, interleaved)
    for interleaved in (False, True)
    for shape, rotated, positions in [
        ((2, 5, 3, 64), None, None),
        ((2, 5, 3, 64), 32, "L"),
        ((2, 5, 3, 20), 10, "BL"),
        ((1, 1, 1, 2), None, None),
        ((1, 7, 2, 33), 14, "L"),
        ((3, 40, 4, 128), None, "BL"),
        ((0, 5, 3, 16), None, None),
        ((2, 0, 3, 16), None, None),
        ((2, 3, 2, 8), 0, None),
    ]
] + [rope_case((2, 6, 2, 16), None, "BL", index=torch.int32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, backend, dtype):
    run_forward(case, backend, dtype)
    run_forward(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, backend, dtype):
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, interleaved, layout, dtype):
    case = rope_case((3, 5, 4, 24), 16, "BL", interleaved)
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_finite_differences(backend):
    check_finite_differences(rope_case((2, 5, 3, 20), 10, "BL", True), backend)
    check_finite_differences(rope_case((2, 5, 3, 64), 32, "L"), backend)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_in_place(backend, interleaved):
    x = convert(torch.randn(2, 5, 3, 16), backend)
    angle = torch.rand(5, 8)
    cos, sin = convert(angle.cos(), backend), convert(angle.sin(), backend)
    expected = fk.rope(x, cos, sin, interleaved=interleaved)
    result = fk.rope(x, cos, sin, interleaved=interleaved, inplace=True)
    assert result is x
    assert (x == expected).all()


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_in_place_over_the_positions(make):
    """Which were checked, and would then be the numbers that were written over them."""
    values, table = np.zeros((1, 4096, 2, 8), np.float32), np.ones((9, 4), np.float32)
    values[0, 1024:] = 1e9
    x, cos = make(values), make(table)
    positions = x.view(np.int32 if x is values else torch.int32).reshape(-1)[:4096].reshape(1, 4096)
    with raises("rope: positions: expected memory that nothing is written to, got some of x's"):
        fk.rope(x, cos, cos, positions=positions, inplace=True)
    fk.rope(x, cos, cos, positions=positions)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_in_place_with_gradients(backend):
    base = convert(torch.randn(2, 5, 3, 16), backend).requires_grad_()
    angle = torch.rand(5, 8)
    cos, sin = convert(angle.cos(), backend), convert(angle.sin(), backend)
    x = base * 1.0
    y = fk.rope(x, cos, sin, inplace=True)
    weight = torch.randn_like(y)
    (ours,) = torch.autograd.grad((y * weight).sum(), base)
    (expected,) = torch.autograd.grad((fk.rope(base, cos, sin) * weight).sum(), base)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    x = make(np.ones((1, 4, 2, 8), np.float32))
    table = make(np.ones((4, 4), np.float32))
    with raises(r"rope: cos: .*2R <= D|rope: cos: expected"):
        fk.rope(x, make(np.ones((4, 5), np.float32)), make(np.ones((4, 5), np.float32)))
    with raises(r"rope: sin: expected shape \(4, 4\) to fit cos, got \(4, 3\)"):
        fk.rope(x, table, make(np.ones((4, 3), np.float32)))
    with raises("rope: cos: expected at least 4 positions|rope: cos: expected"):
        short = make(np.ones((3, 4), np.float32))
        fk.rope(x, short, short)
    with raises("rope: positions: expected values from 0 to 3.*, got 4"):
        fk.rope(x, table, table, positions=make(np.array([0, 1, 4, 2])))
    with raises(r"rope: positions: expected shape .*, got \(3,\)"):
        fk.rope(x, table, table, positions=make(np.array([0, 1, 2])))

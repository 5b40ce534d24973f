"""selective_state_update against one step of the recurrence in plain torch, on every backend."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    TORCH_BACKENDS,
    assert_close,
    convert,
    lay_out,
    normal,
    raises,
    seeded,
    to_float64,
)


def formula(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    if B.ndim == 2:
        B, C = B[:, None], C[:, None]
    B, C = (t.repeat_interleave(state.shape[1] // t.shape[1], 1) for t in (B, C))
    if state.ndim == 4:
        B, C = B[:, :, None], C[:, :, None]
    state = torch.exp(dt[..., None] * A) * state + dt[..., None] * B * x[..., None]
    y = (state * C).sum(-1)
    y = y if D is None else y + D * x
    return (y if z is None else y * torch.nn.functional.silu(z)), state


def draw(generator, b, channels, n, groups=None, optional=True):
    shared = (b, n) if groups is None else (b, groups, n)
    out = {
        "state": normal(generator, b, *channels, n),
        "x": normal(generator, b, *channels),
        "dt": normal(generator, b, *channels).abs(),
        "A": -torch.exp(normal(generator, *channels, n)),
        "B": normal(generator, *shared),
        "C": normal(generator, *shared),
    }
    if optional:
        out["D"] = normal(generator, *channels)
        out["z"] = normal(generator, b, *channels)
        out["dt_bias"] = normal(generator, *channels)
    return out


SHAPES = [
    ((1,), 1, None),
    ((17,), 16, None),
    ((6,), 5, 3),
    ((32,), 256, 1),
    ((3, 7), 16, None),
    ((4, 5), 130, 2),
    ((8, 6), 64, 2),
]


@pytest.mark.parametrize("state_dtype", ("float32", "own"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels, n, groups", SHAPES, ids=str)
def test_step(channels, n, groups, backend, dtype, state_dtype):
    for b, optional, softplus in ((1, True, True), (3, False, False)):
        tensors = draw(seeded("step", channels, n, b), b, channels, n, groups, optional)
        cast = getattr(torch, dtype)
        kept = {"A", "D", "dt_bias"} | ({"state"} if state_dtype == "float32" else set())
        tensors = {k: t.to(torch.float32 if k in kept else cast) for k, t in tensors.items()}
        exact = formula(**{k: t.double() for k, t in tensors.items()}, dt_softplus=softplus)
        same = formula(**{k: t.to(cast) for k, t in tensors.items()}, dt_softplus=softplus)
        moved = {k: convert(t.clone(), backend) for k, t in tensors.items()}
        result = fk.selective_state_update(**moved, dt_softplus=softplus)
        y, after = result if backend.startswith("jax") else (result, moved["state"])
        assert_close(y, exact[0], same[0], dtype, 2.0, f"y {backend} {dtype}", 1e-6)
        kind = "float32" if state_dtype == "float32" else dtype
        assert str(after.dtype).removeprefix("torch.") == kind
        assert_close(after, exact[1], same[1], kind, 2.0, f"state {backend} {dtype}", 1e-6)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("layout", ("padded_rows", "every_other", "transposed", "offset"))
def test_layouts(layout, backend):
    tensors = {k: t.float() for k, t in draw(seeded("layouts"), 3, (9,), 17).items()}
    expected_y, expected = formula(**tensors)
    moved = {k: convert(lay_out(t, layout), backend) for k, t in tensors.items()}
    y = fk.selective_state_update(**moved)
    torch.testing.assert_close(y.cpu(), expected_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved["state"].cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_mamba2_form(backend):
    """One A, dt, D and bias per head, repeated by strides of 0."""
    b, h, p, n = 2, 4, 8, 16
    generator = seeded("mamba2")
    tensors = {k: t.float() for k, t in draw(generator, b, (h, p), n, 2).items()}
    for k in ("dt", "D", "dt_bias"):
        tensors[k] = tensors[k][..., :1].expand_as(tensors[k])
    tensors["A"] = tensors["A"][:, :1, :1].expand_as(tensors["A"])
    expected_y, expected = formula(**tensors, dt_softplus=True)
    moved = {k: convert(t, backend) for k, t in tensors.items()}
    assert moved["A"].stride()[1:] == (0, 0)
    y = fk.selective_state_update(**moved, dt_softplus=True)
    torch.testing.assert_close(y.cpu(), expected_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved["state"].cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_steps_are_the_scan(backend):
    b, length, d, n = 2, 12, 10, 8
    t = {k: convert(v.float(), backend) for k, v in draw(seeded("steps"), b, (d,), n).items()}
    generator = seeded("sequence")
    u, delta, z = (convert(normal(generator, b, length, d).float(), backend) for _ in range(3))
    B, C = (convert(normal(generator, b, length, n).float(), backend) for _ in range(2))
    expected, last = fk.selective_scan(
        u, delta, t["A"], B, C, t["D"], z=z, delta_bias=t["dt_bias"], delta_softplus=True,
        initial_state=t["state"], return_last_state=True,
    )  # fmt: skip
    state = t["state"].clone()
    for i in range(length):
        y = fk.selective_state_update(
            state, u[:, i], delta[:, i], t["A"], B[:, i], C[:, i], t["D"], z=z[:, i],
            dt_bias=t["dt_bias"], dt_softplus=True,
        )  # fmt: skip
        torch.testing.assert_close(y, expected[:, i], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_state_is_updated_under_compile(backend):
    tensors = {k: convert(t.float(), backend) for k, t in draw(seeded("graph"), 2, (5,), 4).items()}
    expected = tensors["state"].clone()
    y = fk.selective_state_update(expected, **{k: t for k, t in tensors.items() if k != "state"})

    def step(t):
        return fk.selective_state_update(**t) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tensors), y + 1)
    torch.testing.assert_close(tensors["state"], expected)


def test_saved_state_that_changed_is_noticed():
    tensors = {k: t.float() for k, t in draw(seeded("version"), 1, (4,), 4).items()}
    weight = torch.ones(1, 4, 4, requires_grad=True)
    loss = (weight * tensors["state"]).sum()
    fk.selective_state_update(**tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_jax_leaves_the_argument_alone():
    jnp = pytest.importorskip("jax.numpy")
    tensors = {k: t.float() for k, t in draw(seeded("jax"), 2, (5,), 4).items()}
    arrays = {k: jnp.asarray(t.numpy()) for k, t in tensors.items()}
    before = np.array(arrays["state"])
    y, after = fk.selective_state_update(**arrays)
    assert (np.array(arrays["state"]) == before).all()
    assert (to_float64(after) != to_float64(before)).any() and y.shape == (2, 5)


def test_errors_name_the_argument():
    t = {k: v.float() for k, v in draw(seeded("errors"), 2, (6,), 4).items()}

    def call(**changed):
        return fk.selective_state_update(**{**t, **changed})

    with raises("selective_state_update: x: expected shape .2, 6."):
        call(x=torch.ones(2, 5))
    with raises(
        r"selective_state_update: x: expected shape \(2, 6\) to fit state, got \(2, 6, 1\)"
    ):
        call(x=torch.ones(2, 6, 1))
    with raises(r"selective_state_update: C: expected shape \(2, 4\) to fit B, got \(2, 1, 4\)"):
        call(C=torch.ones(2, 1, 4))
    with raises("selective_state_update: B: expected a number of groups that divides"):
        call(B=torch.ones(2, 4, 4), C=torch.ones(2, 4, 4))
    with raises("selective_state_update: state: expected float32 or bfloat16, the dtype of x"):
        fk.selective_state_update(
            **{k: v if k == "A" else v.bfloat16() for k, v in t.items() if k != "state"},
            state=t["state"].half(),
        )

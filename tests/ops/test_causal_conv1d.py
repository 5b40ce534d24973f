"""causal_conv1d and its update against plain torch, on every backend."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    assert_close,
    check_finite_differences,
    convert,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
    to_float64,
    to_numpy,
)


def formula(activation=None, return_final_state=False, **_):
    def sequence(x, weight, bias, state):
        history = weight.shape[1] - 1
        if state is None:
            state = x.new_zeros(x.shape[0], history, x.shape[2])
        x = torch.cat([state, x], 1)
        length = x.shape[1] - history
        y = sum(weight[:, k] * x[:, k : k + length] for k in range(history + 1))
        y = y if bias is None else y + bias
        y = torch.nn.functional.silu(y) if activation == "silu" else y
        return y, x[:, length:]

    def call(x, weight, bias=None, initial_state=None, cu_seqlens=None):
        if cu_seqlens is None:
            y, last = sequence(x, weight, bias, initial_state)
        else:
            ys, states = [], []
            for i in range(len(cu_seqlens) - 1):
                own = None if initial_state is None else initial_state[i : i + 1]
                y, last = sequence(x[:, cu_seqlens[i] : cu_seqlens[i + 1]], weight, bias, own)
                ys.append(y)
                states.append(last)
            y, last = torch.cat(ys, 1), torch.cat(states)
        return (y, last) if return_final_state else y

    return call


def conv_case(
    b=2, length=33, d=17, w=4, *, lengths=None, bias=True, initial=False, own_dtype=False,
    **attributes,
):  # fmt: skip
    if lengths is not None:
        b, length = 1, sum(lengths)
    sequences = b if lengths is None else len(lengths)

    def inputs(generator):
        out = {"x": normal(generator, b, length, d), "weight": normal(generator, d, w)}
        if bias:
            out["bias"] = normal(generator, d)
        if initial:
            out["initial_state"] = normal(generator, sequences, w - 1, d)
        if lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            out["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        return out

    options = {"lengths": lengths, "bias": bias, "initial": initial, "own": own_dtype, **attributes}
    name = f"conv-{b}x{length}x{d}x{w}" + "".join(f"-{k}={v}" for k, v in options.items())
    return Case(
        name,
        "causal_conv1d",
        inputs,
        formula(**attributes),
        attributes,
        parameters=() if own_dtype else ("weight", "bias"),
        differentiable=("x", "weight", "bias", "initial_state"),
        gradient_floor=1e-5,
    )


CASES = [
    conv_case(),
    conv_case(activation="silu", bias=False, own_dtype=True),
    conv_case(b=1, length=130, d=5, activation="silu", initial=True, return_final_state=True),
    conv_case(length=1, initial=True, return_final_state=True),
    conv_case(length=2, w=8, activation="silu", initial=True, return_final_state=True),
    conv_case(lengths=(2, 0, 65, 1, 7), initial=True, return_final_state=True, activation="silu"),
    conv_case(lengths=(64, 64), d=3, w=3),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("w", range(2, 9))
def test_widths(w, backend):
    case = conv_case(length=70, w=w, activation="silu", initial=True, return_final_state=True)
    run_forward(case, backend, "float32")
    run_gradients(case, backend, "float32")
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend):
    case = conv_case(initial=True, return_final_state=True, activation="silu")
    run_forward(case, backend, "float32", layout)
    run_gradients(case, backend, "bfloat16", layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_time_contiguous_gives_the_same(backend, dtype):
    generator = seeded("time contiguous")
    x = normal(generator, 2, 75, 19).to(getattr(torch, dtype))
    weight = normal(generator, 19, 4).float()
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    results = []
    for t in (x, turned):
        leaves = [convert(v, backend).detach().requires_grad_() for v in (t, weight)]
        y = fk.causal_conv1d(*leaves, activation="silu")
        results.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def updated(x, state, weight, bias, activation, backend):
    """(y, the state after the call), on any backend."""
    moved = [convert(t, backend) for t in (x, state.clone(), weight, bias)]
    result = fk.causal_conv1d_update(*moved, activation=activation)
    if backend.startswith("jax"):
        return result
    return result, moved[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", (None, "silu"))
def test_update(activation, backend, dtype):
    """Step by step, and several steps at once, as the whole."""
    for b, d, w, length in ((1, 5, 2, 3), (3, 33, 4, 1), (2, 16, 8, 70)):
        generator = seeded("update", b, d, w)
        cast = getattr(torch, dtype)
        x, state = normal(generator, b, length, d).to(cast), normal(generator, b, w - 1, d).to(cast)
        weight, bias = normal(generator, d, w).float(), normal(generator, d).float()
        given = {"weight": weight, "bias": bias, "initial_state": state}
        whole = formula(activation, True)
        exact = whole(x.double(), **{k: t.double() for k, t in given.items()})
        same = whole(x, **{k: t.to(cast) for k, t in given.items()})
        now, outputs = state, []
        for t in range(length):
            y, now = updated(x[:, t].contiguous(), now, weight, bias, activation, backend)
            outputs.append(to_float64(y))
            now = torch.from_numpy(to_float64(now).numpy()).to(cast)
        for y, last in (
            (torch.stack(outputs, 1), now),
            updated(x, state, weight, bias, activation, backend),
        ):
            assert_close(y, exact[0], same[0], dtype, 2.0, f"update {backend} {dtype}")
            assert (to_float64(last) == exact[1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_update_in_place(backend):
    state = torch.zeros(2, 3, 4)
    moved = convert(state, backend)
    result = fk.causal_conv1d_update(
        convert(torch.ones(2, 4), backend), moved, convert(torch.ones(4, 4), backend)
    )
    if backend.startswith("jax"):
        y, after = result
        assert (to_float64(moved) == 0).all()
    else:
        y, after = result, moved
    assert (to_float64(y) == 1).all()
    assert (to_float64(after)[:, -1] == 1).all() and (to_float64(after)[:, :-1] == 0).all()


def test_read_only_state_is_refused():
    state = to_numpy(torch.zeros(2, 3, 4))
    state.flags.writeable = False
    with raises("causal_conv1d_update: state: expected an array that can be written"):
        fk.causal_conv1d_update(np.ones((2, 4), np.float32), state, np.ones((4, 4), np.float32))


def test_errors_name_the_argument():
    x, weight = torch.ones(2, 5, 4), torch.ones(4, 4)
    with raises("causal_conv1d: weight: expected 2 to 8 taps .its last size., got 9"):
        fk.causal_conv1d(x, torch.ones(4, 9))
    with raises("causal_conv1d: weight: expected 2 to 8 taps .its last size., got 1"):
        fk.causal_conv1d(x, torch.ones(4, 1))
    with raises("causal_conv1d: weight: expected W to be at least 1, got 0"):
        fk.causal_conv1d(x, torch.ones(4, 0), initial_state=torch.ones(2, 0, 4))
    with raises("causal_conv1d: weight: expected shape .4, W. to fit x"):
        fk.causal_conv1d(x, torch.ones(5, 4))
    with raises("causal_conv1d: initial_state: expected 2 rows, one per sequence, got 1"):
        fk.causal_conv1d(x, weight, initial_state=torch.ones(1, 3, 4))
    with raises("causal_conv1d: initial_state: expected bfloat16, the dtype of x"):
        fk.causal_conv1d(x.bfloat16(), weight, initial_state=torch.ones(2, 3, 4))
    with raises("causal_conv1d: activation: expected one of None, 'silu', got 'relu'"):
        fk.causal_conv1d(x, weight, activation="relu")
    with raises("causal_conv1d: cu_seqlens: expected a batch of 1"):
        fk.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with raises("causal_conv1d_update: weight: expected shape .4, 4. to fit"):
        fk.causal_conv1d_update(x[:, 0], torch.ones(2, 3, 4), torch.ones(4, 5))

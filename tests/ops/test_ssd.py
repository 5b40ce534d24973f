"""ssd against its recurrence in plain torch, on every backend."""

import inspect
import math

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
    seeded,
    to_float64,
)

BY_STEP = ("x", "dt", "B", "C", "z")


def formula(dt_softplus=False, dt_limit=(0.0, math.inf), return_final_state=False, **_):
    def sequence(x, dt, A, B, C, D, z, dt_bias, state):
        dt = dt if dt_bias is None else dt + dt_bias
        dt = torch.nn.functional.softplus(dt, threshold=1e9) if dt_softplus else dt
        dt = dt.clamp(*dt_limit)
        batch, length, heads, channels = x.shape
        B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
        if state is None:
            state = x.new_zeros(batch, heads, channels, B.shape[3])
        outputs = []
        for t in range(length):
            decay = torch.exp(dt[:, t] * A)[..., None, None]
            state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            outputs.append((state * C[:, t, :, None]).sum(-1))
        y = torch.stack(outputs, 1) if outputs else x.new_zeros(x.shape)
        if D is not None:
            y = y + (D[:, None] if D.ndim == 1 else D) * x
        return (y if z is None else y * torch.nn.functional.silu(z)), state

    def call(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_state=None, cu_seqlens=None):
        if cu_seqlens is None:
            y, last = sequence(x, dt, A, B, C, D, z, dt_bias, initial_state)
        else:
            ys, states = [], []
            for i in range(len(cu_seqlens) - 1):
                rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
                own = None if initial_state is None else initial_state[i : i + 1]
                gate = None if z is None else z[:, rows]
                y, last = sequence(
                    x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows], D, gate, dt_bias, own
                )
                ys.append(y)
                states.append(last)
            y, last = torch.cat(ys, 1), torch.cat(states)
        return (y, last) if return_final_state else y

    return call


def ssd_case(
    b=2, length=33, h=4, p=8, n=16, groups=1, *, lengths=None, optional=True, own_dtype=False,
    initial=False, skip_channels=False, gated=True, gradient_floor=3e-5, **attributes,
):  # fmt: skip
    """own_dtype: parameters in the activations' dtype, as far as they may be. skip_channels: D has
    a number for each channel. gated: there is z too."""
    if lengths is not None:
        b, length = 1, sum(lengths)
    sequences = b if lengths is None else len(lengths)

    def inputs(generator):
        out = {
            "x": normal(generator, b, length, h, p),
            "dt": normal(generator, b, length, h, scale=0.5),
            "A": -torch.exp(normal(generator, h)),
            "B": normal(generator, b, length, groups, n),
            "C": normal(generator, b, length, groups, n),
        }
        if not attributes.get("dt_softplus"):
            out["dt"] = out["dt"].abs() + 0.01
        if optional:
            out["D"] = normal(generator, h, p) if skip_channels else normal(generator, h)
            if gated:
                out["z"] = normal(generator, b, length, h, p)
            out["dt_bias"] = normal(generator, h, scale=0.1).abs()
        if initial:
            out["initial_state"] = normal(generator, sequences, h, p, n)
        if lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            out["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        return out

    name = f"ssd-{b}x{length}x{h}x{p}x{n}" + "".join(
        f"-{k}={v}"
        for k, v in {
            "groups": groups, "lengths": lengths, "optional": optional, "own": own_dtype,
            "initial": initial, "skip": skip_channels, **attributes,
        }.items()
    )  # fmt: skip
    name += "" if gated else "-ungated"
    return Case(
        name,
        "ssd",
        inputs,
        formula(**attributes),
        attributes,
        parameters=("A",) if own_dtype else ("A", "D", "dt_bias", "initial_state"),
        differentiable=("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"),
        gradient_floor=gradient_floor,
        floor=1e-6,
    )


CASES = [
    ssd_case(),
    # On tensor cores dA, a sum of terms of both signs, is 4.3e-5 off, torch's own 0.9e-5.
    ssd_case(optional=False, dt_softplus=True, gradient_floor=5e-5),
    ssd_case(groups=4, dt_softplus=True, initial=True, return_final_state=True),
    ssd_case(h=6, groups=3, initial=True, return_final_state=True, own_dtype=True),
    ssd_case(b=1, length=130, h=2, p=5, n=3, initial=True, return_final_state=True),
    ssd_case(b=3, length=1, h=3, p=33, n=1, return_final_state=True, skip_channels=True),
    # The gradients of dt and A, sums of so many products, miss the bar of three times torch's
    # error: they are 3.2 and 3.9 times as far off.
    ssd_case(
        b=1,
        length=70,
        h=2,
        p=80,
        n=128,
        dt_softplus=True,
        return_final_state=True,
        gradient_floor=2e-4,
    ),
    ssd_case(b=1, length=9, h=1, p=256, n=256, dt_softplus=True, gradient_floor=2e-4),
    ssd_case(lengths=(3, 0, 70, 1, 26), initial=True, return_final_state=True, h=2, groups=2),
    ssd_case(lengths=(9, 64), h=2, p=17, dt_softplus=True, skip_channels=True),
    ssd_case(length=90, dt_softplus=True, dt_limit=(0.4, 0.8), initial=True),
    # Whole vectors and heads of whole 64 channels, as models have them.
    ssd_case(
        length=150, p=64, n=128, groups=2, dt_softplus=True, initial=True,
        return_final_state=True, gradient_floor=2e-4,
    ),
    ssd_case(
        lengths=(70, 0, 3, 64, 131), h=2, p=128, n=24, dt_softplus=True, initial=True,
        return_final_state=True, skip_channels=True, gradient_floor=2e-4,
    ),
    ssd_case(
        length=150, p=64, n=128, groups=2, dt_softplus=True, initial=True, gated=False,
        return_final_state=True, gradient_floor=2e-4,
    ),
    ssd_case(
        lengths=(70, 0, 3, 64, 131), h=3, p=64, n=24, initial=True, gated=False,
        return_final_state=True, skip_channels=True, gradient_floor=2e-4,
    ),
    ssd_case(b=1, length=128, h=3, p=64, n=64, optional=False, gradient_floor=2e-4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, backend, dtype):
    run_forward(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, backend, dtype):
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("chunk_size", (None, 1, 16, 60, 64, 100, 256))
@pytest.mark.parametrize("length", (1, 180, 257))
def test_chunk_sizes(length, chunk_size, backend):
    """Chunks that do and do not divide the length; L 180 in chunks of 16 among them. The gradient
    of A, of some hundreds, is off by 8e-7 of that, more than torch's sum step by step is."""
    case = ssd_case(
        b=1, length=length, h=4, p=16, n=24, groups=2, initial=True, return_final_state=True,
        dt_softplus=True, chunk_size=chunk_size, gradient_floor=8e-4 if length > 100 else 3e-5,
    )  # fmt: skip
    for dtype in ("float32", "float16", "bfloat16"):
        run_forward(case, backend, dtype)
        run_gradients(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("chunk_size", (None, 40))
def test_long_sequences_of_few_heads(chunk_size, backend):
    """Such sequences are cut where blocks are fewer than what the device runs at once."""
    case = ssd_case(
        b=1, length=700, h=2, p=64, n=40, initial=True, return_final_state=True,
        dt_softplus=True, chunk_size=chunk_size, gradient_floor=2e-3,
    )  # fmt: skip
    for dtype in ("float16", "bfloat16"):
        run_forward(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("A", (-1e-4, -0.1, -1.0, -16.0, -80.0))
def test_decays_of_any_size(A, backend):
    """From states that never fade to states that are gone after a step: nothing overflows, and
    every gradient is finite and near the exact one, relative to its largest."""
    generator = seeded("decays", A)
    case = ssd_case(b=1, length=200, h=3, p=4, n=5, optional=False, return_final_state=True)
    tensors = {k: t.float() for k, t in case.inputs(generator).items()}
    tensors["A"] = torch.tensor([A, A / 3, A * 1.5])
    tensors["dt"] = tensors["dt"] * torch.tensor([1.0, 10.0, 0.01])
    tensors["initial_state"] = normal(generator, 1, 3, 4, 5).float()
    weights = [normal(generator, 1, 200, 3, 4).float(), normal(generator, 1, 3, 4, 5).float()]

    def run(call, dtype):
        leaves = {k: t.to(dtype).requires_grad_() for k, t in tensors.items()}
        outputs = call(**leaves)
        given = [w.to(dtype) for w in weights]
        return outputs, torch.autograd.grad(outputs, list(leaves.values()), given)

    exact_outputs, exact = run(case.formula, torch.float64)
    _, same = run(case.formula, torch.float32)
    moved = {k: convert(t, backend).detach() for k, t in tensors.items()}
    leaves = {k: t.requires_grad_() for k, t in moved.items()}
    outputs = fk.ssd(**leaves, return_final_state=True)
    for ours, right in zip(outputs, exact_outputs, strict=True):
        error = (ours.double().cpu() - right).abs().max()
        assert error <= 1e-5 * right.abs().max(), f"{A}: {error:.2e}"
    given = [convert(w, backend) for w in weights]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), given)
    for k, ours, right, peer in zip(tensors, gradients, exact, same, strict=True):
        error = (ours.double().cpu() - right).abs().max()
        bar = max(3 * (peer - right).abs().max(), 2e-5 * right.abs().max()) + 1e-30
        assert error <= bar, f"{A} d{k}: {error:.2e}, bar {bar:.2e}"


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_inputs_of_any_size_stay_finite(backend):
    """A masked exponent may be anything: what is above the diagonal is never taken to a power."""
    x = convert(torch.randn(1, 100, 2, 4), backend).requires_grad_()
    dt = convert(torch.full((1, 100, 2), 1e4), backend).requires_grad_()
    A = convert(torch.tensor([-80.0, -1e-30]), backend).requires_grad_()
    B = convert(torch.randn(1, 100, 1, 8) * 1e-4, backend)
    y = fk.ssd(x, dt, A, B, B)
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), (x, dt, A)))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_equals_selective_scan(dtype, backend):
    """The same model as channels of their own: A and dt repeated for each channel."""
    case = ssd_case(
        b=2, length=150, h=4, p=16, n=16, groups=2, initial=True, return_final_state=True,
        dt_softplus=True,
    )  # fmt: skip
    tensors = {
        k: t.to(torch.float32 if k in case.parameters else getattr(torch, dtype))
        for k, t in case.inputs(seeded("scan", dtype)).items()
    }
    leaves = {k: convert(t, backend).requires_grad_() for k, t in tensors.items()}
    b, length, h, p = tensors["x"].shape
    n = tensors["B"].shape[-1]

    def scan(x, dt, A, B, C, D, z, dt_bias, initial_state):
        def wide(t):
            return t.repeat_interleave(p, -1)

        y, last = fk.selective_scan(
            x.flatten(2), wide(dt), wide(A)[:, None].expand(h * p, n), B, C, wide(D),
            z=z.flatten(2), delta_bias=wide(dt_bias), delta_softplus=True,
            initial_state=initial_state.flatten(1, 2), return_last_state=True,
        )  # fmt: skip
        return y.reshape(x.shape), last.reshape(initial_state.shape)

    ours, theirs = fk.ssd(**leaves, **case.attributes), scan(**leaves)
    given = [torch.randn_like(t) for t in ours]
    gradients = [torch.autograd.grad(o, list(leaves.values()), given) for o in (ours, theirs)]
    near = 1e-4 if dtype == "float32" else 3e-2
    for what, a, b in zip(
        ("y", "final_state", *leaves), (*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True
    ):
        scale = b.float().abs().max().item()
        torch.testing.assert_close(
            a, b, rtol=near, atol=near * scale, msg=lambda m, what=what: f"{what}: {m}"
        )


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_equals_selective_state_update(backend):
    """Step by step, as a model generates."""
    case = ssd_case(
        b=2, length=20, h=4, p=8, n=16, groups=2, initial=True, return_final_state=True,
        dt_softplus=True,
    )  # fmt: skip
    t = {k: convert(v.float(), backend) for k, v in case.inputs(seeded("steps")).items()}
    y, last = fk.ssd(**t, **case.attributes)
    state, shape = t["initial_state"].clone(), t["x"].shape[2:]
    for i in range(20):
        out = fk.selective_state_update(
            state,
            t["x"][:, i],
            t["dt"][:, i, :, None].expand(2, *shape),
            t["A"][:, None, None].expand(*shape, 16),
            t["B"][:, i],
            t["C"][:, i],
            t["D"][:, None].expand(shape),
            z=t["z"][:, i],
            dt_bias=t["dt_bias"][:, None].expand(shape),
            dt_softplus=True,
        )
        torch.testing.assert_close(out, y[:, i], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend):
    case = ssd_case(
        length=70, groups=2, initial=True, return_final_state=True, dt_softplus=True,
        skip_channels=True,
    )  # fmt: skip
    for dtype in DTYPES:
        run_forward(case, backend, dtype, layout)
    run_gradients(case, backend, "float32", layout)
    run_gradients(case, backend, "bfloat16", layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=str)  # limits have kinks
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_limits_stop_the_gradient(backend):
    """dt has no gradient where a limit holds it."""
    dt = convert(torch.tensor([0.1, 0.5, 0.9]).reshape(1, 3, 1), backend).requires_grad_()
    x, B = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
    x, B, A = (convert(t, backend) for t in (x, B, -torch.ones(1)))
    y = fk.ssd(x, dt, A, B, B, dt_limit=(0.2, 0.8))
    (gradient,) = torch.autograd.grad(y.sum(), dt)
    assert gradient.flatten()[[0, 2]].abs().max() == 0 and gradient[0, 1, 0] != 0
    above = fk.ssd(x, dt, A, B, B, dt_limit=(0.0, float("inf")))
    torch.testing.assert_close(above, fk.ssd(x, dt, A, B, B))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cut_sequence_gives_the_same(backend):
    case = ssd_case(b=2, length=150, h=2, dt_softplus=True)
    tensors = {k: t.float() for k, t in case.inputs(seeded("cut")).items()}

    def run(rows, state):
        part = {k: t[:, rows] if k in BY_STEP else t for k, t in tensors.items()}
        part = {k: convert(t.contiguous(), backend) for k, t in part.items()}
        return fk.ssd(**part, initial_state=state, dt_softplus=True, return_final_state=True)

    whole, last = (to_float64(t) for t in run(slice(0, 150), None))
    state, parts = None, []
    for begin, end in ((0, 1), (1, 50), (50, 150)):
        y, state = run(slice(begin, end), state)
        parts.append(to_float64(y))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(to_float64(state), last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradient_flows_through_a_cut(backend):
    """Two parts joined by their state have the gradients of the whole."""
    case = ssd_case(b=1, length=100, h=2, optional=False)
    inputs = {k: convert(t.float(), backend) for k, t in case.inputs(seeded("joined")).items()}
    leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
    fk.ssd(**leaves).square().sum().backward()
    parts = {k: t.clone().requires_grad_() for k, t in inputs.items()}
    first = {k: t[:, :70] if k in BY_STEP else t for k, t in parts.items()}
    second = {k: t[:, 70:] if k in BY_STEP else t for k, t in parts.items()}
    y1, state = fk.ssd(**first, return_final_state=True)
    y2 = fk.ssd(**second, initial_state=state)
    (y1.square().sum() + y2.square().sum()).backward()
    for k in leaves:
        torch.testing.assert_close(leaves[k].grad, parts[k].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_repeats_bit_for_bit(backend):
    case = ssd_case(b=2, length=130, h=6, p=40, n=16, groups=2, dt_softplus=True)
    tensors = {k: convert(t.float(), backend) for k, t in case.inputs(seeded("bits")).items()}
    results = []
    for _ in range(3):
        leaves = {k: t.clone().requires_grad_() for k, t in tensors.items()}
        y = fk.ssd(**leaves, dt_softplus=True)
        results.append((y, *torch.autograd.grad(y.sum(), list(leaves.values()))))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_keeps_nothing_but_inputs(backend):
    case = ssd_case(b=2, length=200, optional=False)
    inputs = case.inputs(seeded("memory"))
    leaves = {k: convert(t.float(), backend).requires_grad_() for k, t in inputs.items()}
    y = fk.ssd(**leaves)
    given = {t.data_ptr() for t in leaves.values()}
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert all(t.data_ptr() in given for t in kept)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_as_models_have_them(dtype, backend):
    """Heads of 64 and of 80, 128 states, several chunks and blocks of heads."""
    for h, p in ((6, 64), (3, 80)):
        # On a T4 dx of float32 is 5.3e-5 off, torch's own 1.7e-5.
        case = ssd_case(
            b=1, length=200, h=h, p=p, n=128, dt_softplus=True, return_final_state=True,
            gradient_floor=6e-5,
        )  # fmt: skip
        run_forward(case, backend, dtype)
        run_gradients(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_are_cut(dtype, backend):
    """So few heads that long sequences are cut into parts, packed or not, with states of their own
    or none; heads that share B and C, and states that fill a row of 256 or not."""
    for case in (
        ssd_case(lengths=(3, 0, 170, 1, 26), chunk_size=4, initial=True, return_final_state=True),
        ssd_case(b=1, length=150, h=3, p=33, n=150, chunk_size=9, optional=False),
        ssd_case(b=1, length=130, h=1, p=100, n=256, chunk_size=8, return_final_state=True),
    ):
        run_forward(case, backend, dtype)


def test_defaults_are_those_of_the_interface():
    parameters = inspect.signature(fk.ssd).parameters
    assert parameters["dt_limit"].default == (0.0, math.inf)
    assert parameters["chunk_size"].default is None
    x, B = torch.randn(1, 5, 2, 3), torch.randn(1, 5, 1, 4)
    given = (x, torch.rand(1, 5, 2), -torch.rand(2), B, B)
    expected = fk.ssd(*given)
    assert torch.equal(fk.ssd(*given, chunk_size=None, dt_limit=(0.0, math.inf)), expected)
    assert torch.equal(fk.ssd(*given, chunk_size=np.int64(0), dt_limit=[0, np.inf]), expected)


def test_errors_name_the_argument():
    case = ssd_case(b=2, length=6, h=4, p=3, n=5, groups=2, initial=True)
    t = {k: v.float() for k, v in case.inputs(seeded("errors")).items()}

    def call(**changed):
        return fk.ssd(**{**t, **changed})

    with raises("ssd: dt: expected shape .2, 6, 4. to fit x"):
        call(dt=t["dt"][:, :5])
    with raises("ssd: A: expected float32, got bfloat16"):
        call(A=t["A"].bfloat16())
    with raises("ssd: B: expected 1 to 256 states"):
        call(B=torch.zeros(2, 6, 2, 257), C=torch.zeros(2, 6, 2, 257), initial_state=None)
    with raises("ssd: x: expected 1 to 256 channels of a head"):
        call(x=torch.zeros(2, 6, 4, 300), z=None, initial_state=None)
    with raises("ssd: B: expected a number of groups that divides x's 4 heads, got 3"):
        call(B=torch.zeros(2, 6, 3, 5), C=torch.zeros(2, 6, 3, 5))
    with raises("ssd: initial_state: expected 2 rows, one per sequence, got 3"):
        call(initial_state=torch.zeros(3, 4, 3, 5))
    with raises("ssd: D: expected shape"):
        call(D=torch.zeros(4, 2))
    with raises("ssd: cu_seqlens: expected a batch of 1"):
        call(cu_seqlens=torch.tensor([0, 6], dtype=torch.int32), initial_state=None)
    with raises("ssd: chunk_size: expected at least 0, got -1"):
        call(chunk_size=-1)
    with raises("ssd: chunk_size: expected an integer or None"):
        call(chunk_size="64")
    with raises("ssd: dt_limit: expected a least that is not above the most, got .0.5, 0.25."):
        call(dt_limit=(0.5, 0.25))
    with raises("ssd: dt_limit_max: expected a number"):
        call(dt_limit=(0.0, float("nan")))

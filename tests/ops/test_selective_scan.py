"""selective_scan against its recurrence in plain torch, on every backend."""

import contextlib

import numpy as np
import pytest
import torch

import flashkernel as fk
import software_gpu
from harness import (
    BACKENDS,
    DTYPES,
    HAVE_CUDA,
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    as_tuple,
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
)

ALGORITHMS = ("sequential", "blelloch", "hillis_steele", "chunked", "cumsum")


def formula(delta_softplus=False, return_last_state=False, **_):
    def sequence(u, delta, A, B, C, D, z, delta_bias, state):
        dt = delta if delta_bias is None else delta + delta_bias
        dt = torch.nn.functional.softplus(dt, threshold=1e9) if delta_softplus else dt
        batch, length, channels = u.shape
        if B.ndim == 3:
            B, C = B[:, :, None], C[:, :, None]
        B, C = (t.repeat_interleave(channels // t.shape[2], 2) for t in (B, C))
        if state is None:
            state = u.new_zeros(batch, channels, A.shape[1])
        outputs = []
        for t in range(length):
            decay = torch.exp(dt[:, t, :, None] * A)
            state = decay * state + dt[:, t, :, None] * B[:, t] * u[:, t, :, None]
            outputs.append((state * C[:, t]).sum(-1))
        y = torch.stack(outputs, 1) if outputs else u.new_zeros(u.shape)
        if D is not None:
            y = y + D * u
        return (y if z is None else y * torch.nn.functional.silu(z)), state

    def call(
        u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, cu_seqlens=None
    ):
        if cu_seqlens is None:
            y, last = sequence(u, delta, A, B, C, D, z, delta_bias, initial_state)
        else:
            ys, states = [], []
            for i in range(len(cu_seqlens) - 1):
                rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
                own = None if initial_state is None else initial_state[i : i + 1]
                gate = None if z is None else z[:, rows]
                y, last = sequence(
                    u[:, rows], delta[:, rows], A, B[:, rows], C[:, rows], D, gate, delta_bias, own
                )
                ys.append(y)
                states.append(last)
            y, last = torch.cat(ys, 1), torch.cat(states)
        return (y, last) if return_last_state else y

    return call


def scan_case(
    b=2, length=33, d=17, n=8, groups=None, *, lengths=None, optional=True, own_dtype=False,
    initial=False, gradient_floor=3e-5, **attributes,
):  # fmt: skip
    """own_dtype: parameters in the activations' dtype, as far as they may be."""
    if lengths is not None:
        b, length = 1, sum(lengths)
    sequences = b if lengths is None else len(lengths)

    def inputs(generator):
        shared = (b, length, n) if groups is None else (b, length, groups, n)
        out = {
            "u": normal(generator, b, length, d),
            "delta": normal(generator, b, length, d, scale=0.5),
            "A": -torch.exp(normal(generator, d, n)),
            "B": normal(generator, *shared),
            "C": normal(generator, *shared),
        }
        if not attributes.get("delta_softplus"):
            out["delta"] = out["delta"].abs()
        if optional:
            out["D"] = normal(generator, d)
            out["z"] = normal(generator, b, length, d)
            out["delta_bias"] = normal(generator, d, scale=0.1).abs()
        if initial:
            out["initial_state"] = normal(generator, sequences, d, n)
        if lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            out["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        return out

    name = f"scan-{b}x{length}x{d}x{n}" + "".join(
        f"-{k}={v}"
        for k, v in {
            "groups": groups, "lengths": lengths, "optional": optional, "own": own_dtype,
            "initial": initial, **attributes,
        }.items()
    )  # fmt: skip
    return Case(
        name,
        "selective_scan",
        inputs,
        formula(**attributes),
        attributes,
        parameters=("A",) if own_dtype else ("A", "D", "delta_bias", "initial_state"),
        differentiable=("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"),
        gradient_floor=gradient_floor,
        floor=1e-6,
    )


CASES = [
    scan_case(),
    scan_case(optional=False, delta_softplus=True),
    scan_case(groups=1, delta_softplus=True, initial=True, return_last_state=True),
    scan_case(d=18, groups=3, initial=True, return_last_state=True, own_dtype=True),
    scan_case(b=1, length=130, d=5, n=3, initial=True, return_last_state=True),
    scan_case(b=3, length=1, d=33, n=1, return_last_state=True),
    scan_case(b=1, length=7, d=1, n=256, delta_softplus=True, return_last_state=True),
    scan_case(lengths=(3, 0, 70, 1, 26), initial=True, return_last_state=True, groups=1),
    scan_case(lengths=(9, 64), d=6, groups=2, delta_softplus=True),
]
CHECKPOINTS = (0, 1, 5, 64, 100, 1000, -1)
# What float32 leaves of dA where a state hardly fades: torch's own error is 5e-6 to 1.1e-4, by the
# draw, and ours may be as large where torch's is small.
HARDLY_FADES = 1.1e-4
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(algorithm, backend):
    """Each by itself: lengths around its tiles and chunks, states carried, packed sequences."""
    for arguments in (
        {"b": 2, "length": 63, "d": 9, "n": 5},
        {"b": 1, "length": 300, "d": 3, "n": 4},
        {"lengths": (1, 64, 0, 200), "d": 4, "n": 2},
    ):
        case = scan_case(
            **arguments, initial=True, return_last_state=True, delta_softplus=True,
            algorithm=algorithm, gradient_floor=HARDLY_FADES,
        )  # fmt: skip
        for dtype in ("float32", "bfloat16"):
            run_forward(case, backend, dtype)
        run_gradients(case, backend, "float32")


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_blocks_with_fewer_channels(backend):
    """Few channels, spread over a GPU: the last block gets a part of what it could take."""
    for length in (70, 300):
        case = scan_case(
            1, length, d=1100, n=16, groups=1, initial=True, return_last_state=True,
            delta_softplus=True,
        )  # fmt: skip
        run_forward(case, backend, "bfloat16")


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("turned", (False, True), ids=("channels", "time"))
def test_time_cut_among_blocks(turned, dtype, backend):
    """Enough channels that a GPU's blocks take turns with the steps of a sequence; last blocks and
    last tiles that are not full; states kept at tiles' ends and within; both memory layouts."""
    for arguments in (
        {"b": 1, "length": 712, "d": 1064, "groups": 1, "initial": True, "checkpoint": 64},
        {"b": 2, "length": 520, "d": 312, "groups": 3, "delta_softplus": True, "checkpoint": 16},
        {"b": 3, "length": 264, "d": 184, "optional": False, "initial": True},
        {"b": 1, "length": 512, "d": 1584, "delta_softplus": True, "checkpoint": 256},
    ):
        case = scan_case(**arguments, n=16, return_last_state=True)
        generator = seeded(case.name, dtype)
        tensors = {
            k: t.to(torch.float32 if k in case.parameters else getattr(torch, dtype))
            for k, t in case.inputs(generator).items()
        }
        exact = case.formula(**{k: t.double() for k, t in tensors.items()})
        same = case.formula(**{k: t.float() for k, t in tensors.items()})
        leaves = {}
        for k, t in tensors.items():
            if turned and k in ("u", "delta", "z"):
                t = t.transpose(1, 2).contiguous().transpose(1, 2)
            leaves[k] = convert(t, backend).detach().requires_grad_()
        ours = fk.selective_scan(**leaves, **case.attributes)
        assert_close(ours[0], exact[0], same[0].to(ours[0].dtype), dtype, 2.0, f"{case} y")
        # For 2-byte types a GPU takes decays from its special function unit: off by a little more.
        assert_close(ours[1], exact[1], same[1], "float32", 16.0, f"{case} last state")
        # From the states kept, with those of every step by another kernel.
        sums = [ours[0].float().square().sum() + ours[1].square().sum()]
        exact_way = fk.selective_scan(
            **leaves, **{**case.attributes, "checkpoint": 0}, algorithm="sequential"
        )
        sums += [exact_way[0].float().square().sum() + exact_way[1].square().sum()]
        gradients = [torch.autograd.grad(x, list(leaves.values())) for x in sums]
        for k, a, b in zip(leaves, *gradients, strict=True):
            scale = b.float().abs().max().item()
            near = 2e-2 if dtype == "bfloat16" else 3e-3
            torch.testing.assert_close(
                a, b, rtol=near, atol=near * scale, msg=lambda m, k=k: f"{k}: {m}"
            )


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_decays_of_any_size(algorithm, backend):
    """From states that never fade to states that are gone after a step: sums in log space must
    begin anew before they overflow, and products of decays may vanish."""
    generator = seeded("decays", algorithm)
    for scale in (1e-4, 0.3, 30.0, 3000.0):
        tensors = {
            "u": normal(generator, 1, 150, 4),
            "delta": normal(generator, 1, 150, 4).abs() * scale,
            "A": -torch.ones(4, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0]),
            "B": normal(generator, 1, 150, 3) / scale,
            "C": normal(generator, 1, 150, 3),
        }
        exact = formula()(**{k: t.float().double() for k, t in tensors.items()})
        same = formula()(**{k: t.float() for k, t in tensors.items()})
        moved = {k: convert(t.float(), backend) for k, t in tensors.items()}
        ours = fk.selective_scan(**moved, algorithm=algorithm)
        # The parallel ones round products of decays, some of which the formula never makes.
        factor = 2.0 if algorithm == "sequential" else 16.0
        assert_close(ours, exact, same, "float32", factor, f"{algorithm} {scale}")


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_of_decays_of_any_size(algorithm, backend):
    """As above, backwards: every gradient is finite and near the exact one, relative to its
    largest."""
    generator = seeded("gradients of decays", algorithm)
    for scale in (1e-4, 0.3, 30.0, 3000.0):
        tensors = {
            "u": normal(generator, 1, 70, 4),
            "delta": normal(generator, 1, 70, 4).abs() * scale,
            "A": -torch.ones(4, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0]),
            "B": normal(generator, 1, 70, 3) / scale,
            "C": normal(generator, 1, 70, 3),
            "initial_state": normal(generator, 1, 4, 3),
        }
        tensors = {k: t.float() for k, t in tensors.items()}
        exact = {k: t.double().requires_grad_() for k, t in tensors.items()}
        formula()(**exact).sum().backward()
        ours = {k: convert(t, backend).requires_grad_() for k, t in tensors.items()}
        fk.selective_scan(**ours, algorithm=algorithm).sum().backward()
        for k, t in exact.items():
            error = (ours[k].grad.double().cpu() - t.grad).abs().max()
            relative = 2e-4 if backend == "torch_cuda" else 2e-5  # whose powers are rougher
            bar = relative * t.grad.abs().max() + 1e-30  # below, float32 has nothing
            assert error <= bar, f"{algorithm} {scale} d{k}: {error:.2e}, bar {bar:.2e}"


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_in_time_contiguous_memory(algorithm, backend):
    """Each gives what it gives where channels are contiguous."""
    case = scan_case(b=2, length=67, d=19, n=5, delta_softplus=True)
    inputs = {k: t.float() for k, t in case.inputs(seeded("turned", algorithm)).items()}
    results = []
    for turn in (False, True):
        leaves = {}
        for k, t in inputs.items():
            if turn and k in ("u", "delta", "z"):
                t = t.transpose(1, 2).contiguous().transpose(1, 2)
            leaves[k] = convert(t, backend).detach().requires_grad_()
        y = fk.selective_scan(**leaves, delta_softplus=True, algorithm=algorithm)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend):
    case = scan_case(groups=1, initial=True, return_last_state=True, delta_softplus=True)
    run_forward(case, backend, "float32", layout)
    run_gradients(case, backend, "float32", layout)
    run_gradients(case, backend, "bfloat16", layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_time_contiguous_gives_the_same(backend, dtype):
    """(B, D, L) memory, as other packages have it."""
    generator = seeded("time contiguous")
    case = scan_case(b=2, length=75, d=19, n=4)
    tensors = {
        k: t.to(torch.float32 if k in case.parameters else getattr(torch, dtype))
        for k, t in case.inputs(generator).items()
    }
    results = []
    for turn in (False, True):
        leaves = {}
        for k, t in tensors.items():
            if turn and t.ndim == 3:
                t = t.transpose(1, 2).contiguous().transpose(1, 2)
            leaves[k] = convert(t, backend).detach().requires_grad_()
        y = fk.selective_scan(**leaves)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), list(leaves.values()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [CASES[2], CASES[7]], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_checkpoints_change_no_gradient(checkpoint, backend):
    for arguments in ({"b": 2, "length": 150}, {"lengths": (65, 3, 140)}):
        case = scan_case(
            **arguments, d=5, n=6, initial=True, return_last_state=True, checkpoint=checkpoint,
            gradient_floor=HARDLY_FADES,
        )  # fmt: skip
        run_gradients(case, backend, "float32")


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_memory_of_checkpoints(backend):
    """What a forward keeps for its backward: a state of N floats per channel and spacing."""
    b, length, d, n = 2, 200, 8, 4
    inputs = scan_case(b=b, length=length, d=d, n=n, optional=False).inputs(seeded("memory"))
    leaves = {k: convert(t.float(), backend).requires_grad_() for k, t in inputs.items()}
    expected = {1: 200, 5: 40, 64: 3, 300: 0, 0: 0, -1: 13}  # -1: every 15 steps
    for checkpoint, count in expected.items():
        y = fk.selective_scan(**leaves, checkpoint=checkpoint)
        given = {t.data_ptr() for t in leaves.values()}
        kept = [t for t in y.grad_fn.saved_tensors if t is not None and t.data_ptr() not in given]
        assert sum(t.numel() for t in kept) == b * count * n * d, checkpoint
    with torch.no_grad():
        assert fk.selective_scan(**leaves).grad_fn is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", ("auto", *ALGORITHMS))
def test_a_cut_sequence_gives_the_same(algorithm, backend):
    case = scan_case(b=2, length=90, d=6, n=4, delta_softplus=True)
    tensors = {k: t.float() for k, t in case.inputs(seeded("cut")).items()}
    options = {"delta_softplus": True, "return_last_state": True, "algorithm": algorithm}

    def run(rows, state):
        part = {
            k: t[:, rows] if k in ("u", "delta", "B", "C", "z") else t for k, t in tensors.items()
        }
        part = {k: convert(t.contiguous(), backend) for k, t in part.items()}
        return fk.selective_scan(**part, initial_state=state, **options)

    whole, last = (to_float64(t) for t in run(slice(0, 90), None))
    state, parts = None, []
    for begin, end in ((0, 1), (1, 50), (50, 90)):
        y, state = run(slice(begin, end), state)
        parts.append(to_float64(y))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(to_float64(state), last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradient_flows_through_a_cut(backend):
    """Two halves joined by their state have the gradients of the whole."""
    case = scan_case(b=1, length=40, d=3, n=4, optional=False)
    inputs = {k: convert(t.float(), backend) for k, t in case.inputs(seeded("joined")).items()}
    leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
    fk.selective_scan(**leaves).square().sum().backward()
    halves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
    first = {k: t[:, :25] if t.ndim == 3 else t for k, t in halves.items()}
    second = {k: t[:, 25:] if t.ndim == 3 else t for k, t in halves.items()}
    y1, state = fk.selective_scan(**first, return_last_state=True)
    y2 = fk.selective_scan(**second, initial_state=state)
    (y1.square().sum() + y2.square().sum()).backward()
    for k in leaves:
        torch.testing.assert_close(leaves[k].grad, halves[k].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    for shape in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        case = scan_case(b=shape[0], length=shape[1], d=shape[2], n=4, initial=True)
        tensors = {k: t.float() for k, t in case.inputs(seeded("empty")).items()}
        moved = {k: convert(t, backend) for k, t in tensors.items()}
        y, last = as_tuple(fk.selective_scan(**moved, return_last_state=True))
        assert tuple(y.shape) == shape
        if shape[1] == 0:
            assert (to_float64(last) == to_float64(tensors["initial_state"])).all()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_repeats_bit_for_bit(backend):
    case = scan_case(b=2, length=130, d=40, n=16, groups=1, delta_softplus=True)
    tensors = {k: convert(t.float(), backend) for k, t in case.inputs(seeded("bits")).items()}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = []
        for _ in range(3):
            leaves = {k: t.clone().requires_grad_() for k, t in tensors.items()}
            y = fk.selective_scan(**leaves, delta_softplus=True)
            results.append((y, *torch.autograd.grad(y.sum(), list(leaves.values()))))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_errors_name_the_argument():
    case = scan_case(b=2, length=6, d=4, n=3, initial=True)
    t = {k: v.float() for k, v in case.inputs(seeded("errors")).items()}

    def call(**changed):
        return fk.selective_scan(**{**t, **changed})

    with raises("selective_scan: delta: expected shape .2, 6, 4. to fit u"):
        call(delta=t["delta"][:, :5])
    with raises("selective_scan: A: expected float32, got bfloat16"):
        call(A=t["A"].bfloat16())
    with raises("selective_scan: A: expected 1 to 256 states"):
        call(A=torch.zeros(4, 257), B=torch.zeros(2, 6, 257), C=torch.zeros(2, 6, 257),
             initial_state=None)  # fmt: skip
    with raises("selective_scan: B: expected a number of groups that divides u's 4 channels"):
        call(B=torch.zeros(2, 6, 3, 3), C=torch.zeros(2, 6, 3, 3))
    none = torch.zeros(1, 2, 0)
    with raises("selective_scan: B: expected a number of groups .* 0 channels, got 0"):
        fk.selective_scan(
            none, none, torch.zeros(0, 2), torch.zeros(1, 2, 0, 2), torch.zeros(1, 2, 0, 2)
        )
    with raises(r"selective_scan: C: expected shape \(2, 6, 3\) to fit B, got \(2, 6, 1, 3\)"):
        call(C=t["C"][:, :, None])
    with raises("selective_scan: initial_state: expected 2 rows, one per sequence, got 3"):
        call(initial_state=torch.zeros(3, 4, 3))
    with raises("selective_scan: cu_seqlens: expected a batch of 1"):
        call(cu_seqlens=torch.tensor([0, 6], dtype=torch.int32), initial_state=None)
    with raises("selective_scan: cu_seqlens: expected the last value to be 6"):
        call(**{k: t[k][:1] for k in ("u", "delta", "B", "C", "z", "initial_state")},
             cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))  # fmt: skip
    with raises("selective_scan: checkpoint: expected at least -1, got -2"):
        call(checkpoint=-2)
    with raises("selective_scan: algorithm: expected one of 'auto', 'sequential'"):
        call(algorithm="parallel")


@pytest.mark.skipif(not (HAVE_CUDA or software_gpu.ON), reason="needs a GPU")
def test_gpu_agrees_on_long_sequences():
    """Enough channels and steps that every way of cutting the work is taken."""
    for arguments in ({"b": 1, "length": 5000, "d": 64}, {"b": 4, "length": 300, "d": 1500}):
        case = scan_case(**arguments, n=16, delta_softplus=True)
        tensors = {k: t.float() for k, t in case.inputs(seeded("long")).items()}
        on_cpu = {k: t.clone().requires_grad_() for k, t in tensors.items()}
        on_gpu = {k: convert(t, "torch_cuda").clone().requires_grad_() for k, t in tensors.items()}
        results = []
        for leaves, place in ((on_cpu, software_gpu.absent()), (on_gpu, contextlib.nullcontext())):
            with place:
                y = fk.selective_scan(**leaves, delta_softplus=True)
                results.append((y, *torch.autograd.grad(y.square().mean(), list(leaves.values()))))
        for a, b in zip(*results, strict=True):
            scale = a.abs().max().item()
            torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4 * scale)

"""attention against its formula in plain torch, feature by feature, on every backend."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashkernel as fk
import software_gpu
from attention_cases import FEATURES, LONG, SIZES, attention_case
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    WITH_GRADIENTS,
    assert_close,
    check_finite_differences,
    convert,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FEATURES + SIZES, ids=str)
def test_forward(case, backend, dtype):
    run_forward(case, backend, dtype)
    if backend.startswith("torch"):
        run_forward(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("case", FEATURES + SIZES, ids=str)
def test_gradients(case, backend, dtype):
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long(case, backend, dtype):
    run_forward(case, backend, dtype)
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_very_long(backend):
    """Some rows of the output and of each gradient; on a GPU, memory without an L x L buffer."""
    cuda = backend == "torch_cuda" and not software_gpu.ON
    length, dtype, bar = (131072, torch.bfloat16, 2e-2) if cuda else (16384, torch.float32, 1e-5)
    if software_gpu.ON:
        length, dtype, bar = 2048, torch.bfloat16, 2e-2
    generator = seeded("very long")
    q, k, v, dout = (
        convert(torch.randn(1, length, 2, 64, generator=generator).to(dtype), backend)
        for _ in range(4)
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out, lse = fk.attention(*leaves, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    if cuda:
        used = torch.cuda.max_memory_allocated() - before
        assert used < 16 * q.numel() * q.element_size()
    scale = 64**-0.5
    rows = (5, 77, length // 2 + 1, length - 1)
    for h, row in itertools.product(range(2), rows):
        eq, ek, ev, eout, edout = (t[0, :, h].detach().double() for t in (q, k, v, out, dout))
        delta = (eout * edout).sum(-1)
        # As a query: over the keys that it sees.
        p = torch.softmax(scale * (ek[: row + 1] @ eq[row]), 0)
        ds = p * (ev[: row + 1] @ edout[row] - delta[row])
        expected = [p @ ev[: row + 1], scale * (ds @ ek[: row + 1])]
        # As a key: over the queries that see it.
        p = torch.exp(scale * (eq[row:] @ ek[row]) - lse[0, h, row:].double())
        ds = p * (edout[row:] @ ev[row] - delta[row:])
        expected += [scale * (ds @ eq[row:]), p @ edout[row:]]
        for x, e in zip((out, dq, dk, dv), expected, strict=True):
            assert ((x[0, row, h] - e).norm() / e.norm()).item() < bar


# Values up to 1: float16 rounds an output of 2 or more by up to 0.98e-3 already.
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize(
    "backend, length, b",
    [
        (backend, length, b)
        for backend in TORCH_BACKENDS
        for length, b in itertools.product((512, 1024, 2048, 4096), (1, 4, 8))
        if (backend == "torch_cuda" and not software_gpu.ON) or (length <= 1024 and b == 1)
    ],
)
def test_float16_is_within_a_thousandth_of_float32(backend, length, b, d, causal):
    generator = torch.Generator().manual_seed(length + b + d)
    q, k, v = (torch.randn(b, length, 8, d, generator=generator) for _ in range(3))
    q, k, v = (convert(t.half(), backend) for t in (q, k, v.clamp(-1, 1)))
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in (q, k, v)), is_causal=causal
    )
    error = fk.attention(q, k, v, causal=causal).float() - exact.transpose(1, 2)
    assert error.abs().max().item() < 1e-3


# The Hopper backward by the number of its tiles: two blocks of threads for each (all of one length,
# or the longest first), one for each, and so many that sums of dq change places.
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "b, length, h, g, d",
    [
        (1, 640, 4, 2, 64),
        (1, 640, 4, 2, 96),
        (1, 640, 4, 2, 128),
        (1, 2048, 8, 8, 64),
        (1, 2048, 8, 8, 128),
        (4, 640, 8, 4, 128),
        (8, 1280, 16, 8, 64),
        (6, 1280, 16, 16, 96),
        (4, 1280, 16, 16, 128),
    ][: 3 if software_gpu.ON else None],
)
@pytest.mark.parametrize("backend", [b for b in TORCH_BACKENDS if b == "torch_cuda"])
def test_gradients_by_size(backend, b, length, h, g, d, causal):
    generator = torch.Generator().manual_seed(length + b + d)
    q, k, v, dout = (
        convert(torch.randn(b, length, n, d, generator=generator).half(), backend)
        for n in (h, g, g, h)
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    ours = torch.autograd.grad(fk.attention(*leaves, causal=causal), leaves, dout)
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in exact), is_causal=causal, enable_gqa=True
    )
    expected = torch.autograd.grad(out.transpose(1, 2), exact, dout.float())
    for x, e in zip(ours, expected, strict=True):
        assert ((x - e).norm() / e.norm()).item() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout, dtype):
    case = attention_case(
        2, 33, 40, h=4, g=2, d=24, e=16, causal=True, bias=(None, 1, None, None), sinks=True,
        return_lse=True,
    )  # fmt: skip
    run_forward(case, backend, dtype, layout)
    if backend != "numpy":
        run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        attention_case(1, 9, 12, h=2, g=1, d=8, causal=True, return_lse=True),
        attention_case(1, 9, h=2, d=8, softcap=2.0, sinks=True, bias=(1, None, None, None)),
        attention_case(lengths=((4, 6), (5, 5)), h=2, g=1, d=8, rotary=4, window=(3, 1)),
    ],
    ids=str,
)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_deterministic(backend, dtype):
    case = attention_case(2, 300, h=4, g=2, d=64, causal=True)
    tensors = case.inputs(seeded("deterministic", dtype))
    q, k, v = (
        convert(tensors[n].to(getattr(torch, dtype)), backend).requires_grad_() for n in "qkv"
    )
    runs = []
    for _ in range(3):
        out = fk.attention(q, k, v, causal=True, deterministic=True)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_one_gradient_at_a_time(backend):
    tensors = attention_case(2, 40, h=4, g=2).inputs(seeded("one at a time"))
    tensors = {n: convert(t.float(), backend) for n, t in tensors.items()}
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    together = torch.autograd.grad(fk.attention(**leaves).square().sum(), list(leaves.values()))
    for (name, t), expected in zip(tensors.items(), together, strict=True):
        alone = t.clone().requires_grad_()
        out = fk.attention(**{**tensors, name: alone})
        (gradient,) = torch.autograd.grad(out.square().sum(), alone)
        assert_close(gradient, expected, expected, "float32", 1.0, name, 1e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_special_values(backend):
    q, k, v = (convert(torch.randn(1, 8, 1, 16), backend) for _ in range(3))
    bias = torch.zeros(8, 8)
    bias[3] = -math.inf  # sees no key
    bias[5, 2] = math.nan
    bias[6, 1:] = -math.inf  # sees one
    out, lse = fk.attention(q, k, v, bias=convert(bias, backend), return_lse=True)
    assert (out[0, 3] == 0).all() and lse[0, 0, 3] == -math.inf
    assert out[0, 5].isnan().all() and lse[0, 0, 5].isnan()
    assert torch.allclose(out[0, 6], v[0, 0])
    assert out[0, [0, 1, 2, 4, 6, 7]].isfinite().all()
    leaf = q.clone().requires_grad_()
    masked = bias.nan_to_num(nan=0.0, neginf=-math.inf)
    fk.attention(leaf, k, v, bias=convert(masked, backend)).sum().backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[0, 3] == 0).all()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_large_scores(backend):
    """No overflow on the way: only differences of scores reach the exponential."""
    case = attention_case(1, 70, h=2, d=32, causal=True, scale=100.0, return_lse=True)
    run_forward(case, backend, "float32")


@pytest.mark.parametrize("softcap", (0.0, 20.0))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d,e", ((64, 64), (128, 128), (192, 128)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_packed_sequences_stay_apart(backend, dtype, d, e, causal, softcap):
    """NaN in one sequence reaches no other: blocks of rows end in the middle of a neighbour."""
    q_ends, k_ends = (0, 100, 230, 430), (0, 130, 200, 520)
    generator = seeded("apart", dtype, d, causal)
    q = normal(generator, q_ends[-1], 2, d)
    k, v = (normal(generator, k_ends[-1], 2, columns) for columns in (d, e))
    for t, ends in ((q, q_ends), (k, k_ends), (v, k_ends)):
        t[ends[1] : ends[2]] = math.nan
    leaves = [convert(t.to(getattr(torch, dtype)), backend).requires_grad_() for t in (q, k, v)]
    offsets = [convert(torch.tensor(e, dtype=torch.int32), backend) for e in (q_ends, k_ends)]
    out = fk.attention(
        *leaves, causal=causal, softcap=softcap, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]
    )
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    for result, ends in zip((out, *gradients), (q_ends, q_ends, k_ends, k_ends), strict=True):
        middle = result[ends[1] : ends[2]]
        assert middle.isnan().any()
        assert not torch.cat([result[: ends[1]], result[ends[2] :]]).isnan().any()


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_any_options(data):
    """Options and shapes drawn together, forward and backward."""
    draw = data.draw
    packed = draw(st.booleans())
    length = st.integers(0, 90)
    g, d = draw(st.integers(1, 3)), draw(st.sampled_from((4, 8, 20, 32, 64, 80)))
    rotary = draw(st.sampled_from((None, None, 1, d // 2)))
    pairs = st.tuples(length, length)
    if rotary:
        pairs = pairs.map(lambda pair: (min(pair), max(pair)))
    lengths = draw(st.lists(pairs, min_size=1, max_size=4))
    (lq, lk) = lengths[0]
    bias = None
    if not packed and draw(st.booleans()):
        bias = tuple(draw(st.sampled_from((1, None))) for _ in range(draw(st.integers(1, 4))))
    side = st.sampled_from((-1, -1, 0, 5, 40))
    case = attention_case(
        draw(st.integers(1, 2)),
        lq,
        lk,
        h=g * draw(st.integers(1, 3)),
        g=g,
        d=d,
        e=draw(st.sampled_from((d, d, 16))),
        lengths=tuple(lengths) if packed else None,
        alibi=draw(st.sampled_from((None, "H", "BH"))),
        sinks=draw(st.booleans()),
        bias=bias,
        rotary=rotary,
        causal=draw(st.booleans()),
        window=(draw(side), draw(side)),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        scale=draw(st.sampled_from((None, 0.3))),
        return_lse=draw(st.booleans()),
        rotary_interleaved=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from(DTYPES))
    for backend in TORCH_BACKENDS:
        run_forward(case, backend, dtype)
        run_gradients(case, backend, dtype)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_errors(make):
    def ones(*shape, dtype=np.float32):
        return make(np.ones(shape, dtype))

    q = ones(2, 5, 4, 8)
    packed = ones(5, 4, 8)
    offsets = make(np.array([0, 2, 5], np.int32))
    for message, arguments in [
        (r"q: expected shape .* got \(5, 4\)", {"q": ones(5, 4)}),
        (r"k: expected shape \(2, Lk, G, 8\) to fit q, got \(5, 4, 8\)", {"k": packed}),
        (r"k: expected shape .* got \(2, 5, 4, 7\)", {"k": ones(2, 5, 4, 7)}),
        ("k: expected a number of heads that divides q's 4, got 3",
         {"k": ones(2, 5, 3, 8), "v": ones(2, 5, 3, 8)}),
        (r"v: expected shape .*, got \(2, 6, 4, 8\)", {"v": ones(2, 6, 4, 8)}),
        ("q: expected a last size of at most 256, got 257",
         {"q": ones(1, 1, 1, 257), "k": ones(1, 1, 1, 257), "v": ones(1, 1, 1, 8)}),
        ("window_left: expected at least -1, got -2", {"window": (-2, 0)}),
        ("window_right: expected at least -1, got -3", {"window": (0, -3)}),
        (r"window: expected a tuple \(left, right\), got 3", {"window": 3}),
        (r"window: expected a tuple", {"window": (1, 2, 3)}),
        ("softcap: expected at least 0, got -1", {"softcap": -1.0}),
        (r"softcap: expected a number that float32 can hold, got 1e\+39", {"softcap": 1e39}),
        (r"scale: expected a number that float32 can hold, got -1e\+39", {"scale": -1e39}),
        ("scale: expected a finite number or None, got inf", {"scale": math.inf}),
        ("cu_seqlens_q: expected none", {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}),
        ("cu_seqlens_q: expected offsets", {"q": packed, "k": packed, "v": packed}),
        ("cu_seqlens_k: expected offsets",
         {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": offsets}),
        ("cu_seqlens_q: expected values that rise from 0, got 3 at 2",
         {"q": packed, "k": packed, "v": packed, "cu_seqlens_k": offsets,
              "cu_seqlens_q": make(np.array([0, 4, 3], np.int32))}),
        ("cu_seqlens_k: expected the last value to be 5, the rows of k, got 4",
         {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": offsets,
              "cu_seqlens_k": make(np.array([0, 2, 4], np.int32))}),
        ("cu_seqlens_q: expected int32, got int64",
         {"q": packed, "k": packed, "v": packed, "cu_seqlens_k": offsets,
              "cu_seqlens_q": make(np.array([0, 2, 5], np.int64))}),
        ("bias: expected none for packed sequences",
         {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
              "bias": ones(5)}),
        (r"bias: expected shape .* to fit q, got \(3, 5\)", {"bias": ones(3, 5)}),
        (r"sinks: expected shape \(4,\) to fit q, got \(2,\)", {"sinks": ones(2)}),
        (r"alibi_slopes: expected shape .* got \(3,\)", {"alibi_slopes": ones(3)}),
        ("rotary: expected a tuple", {"rotary": ones(5, 4)}),
        ("rotary: expected at most 4 columns", {"rotary": (ones(5, 5), ones(5, 5))}),
        ("rotary: expected at least 5 rows", {"rotary": (ones(4, 4), ones(4, 4))}),
        ("rotary: expected no more queries than keys",
         {"k": ones(2, 3, 4, 8), "v": ones(2, 3, 4, 8), "rotary": (ones(9, 4), ones(9, 4))}),
    ]:  # fmt: skip
        tensors = {"q": q, "k": q, "v": q, **arguments}
        with raises(f"attention: {message}"):
            fk.attention(**tensors)

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
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    WITH_GRADIENTS,
    Case,
    assert_close,
    check_finite_differences,
    convert,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)


def rotated(x, cos, sin, interleaved, first):
    """x (B, L, H, D), whose row i sits at position first + i."""
    if cos is None:
        return x
    at = torch.arange(first, first + x.shape[1])
    c, s = cos[at][:, None], sin[at][:, None]
    turned = 2 * cos.shape[1]
    head, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        head = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = head.chunk(2, -1)
        head = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([head, rest], -1)


def formula(
    causal=False,
    window=(-1, -1),
    scale=None,
    softcap=0.0,
    return_lse=False,
    rotary_interleaved=False,
    **_,
):
    def batch(q, k, v, alibi_slopes=None, sinks=None, bias=None, rotary_cos=None, rotary_sin=None):
        (lq, heads, d), (lk, kv_heads) = q.shape[1:], k.shape[1:3]
        if rotary_cos is not None:
            q = rotated(q, rotary_cos, rotary_sin, rotary_interleaved, lk - lq)
            k = rotated(k, rotary_cos, rotary_sin, rotary_interleaved, 0)
        k = k.repeat_interleave(heads // max(kv_heads, 1), 2)
        v = v.repeat_interleave(heads // max(kv_heads, 1), 2)
        s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + bias
        position = torch.arange(lq)[:, None] + lk - lq
        key = torch.arange(lk)
        if alibi_slopes is not None:
            slopes = alibi_slopes[..., None, None]
            s = s - slopes * (position - key).abs().to(s.dtype)
        left, right = (math.inf if w < 0 else w for w in window)
        right = min(right, 0) if causal else right
        seen = (key >= position - left) & (key <= position + right)
        s = s.masked_fill(~seen, -math.inf)
        alive = (s > -math.inf).any(-1, keepdim=True) | s.isnan().any(-1, keepdim=True)
        s = torch.where(alive, s, torch.zeros_like(s))
        with_sink = s
        if sinks is not None:
            extra = sinks[:, None, None].expand(s.shape[0], heads, lq, 1)
            with_sink = torch.cat([s, extra], -1)
        if with_sink.shape[-1]:
            lse = torch.logsumexp(with_sink, -1, keepdim=True)
        else:
            lse = s.new_zeros((*s.shape[:-1], 1))
        p = torch.where(alive, torch.exp(s - lse), torch.zeros_like(s))
        out = torch.einsum("bhij,bjhe->bihe", p, v)
        lse = torch.where(alive, lse, torch.full_like(lse, -math.inf))[..., 0]
        return out, lse

    def call(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, alibi_slopes=None, **rest):
        if cu_seqlens_q is None:
            out, lse = batch(q, k, v, alibi_slopes=alibi_slopes, **rest)
        else:
            outs, lses = [], []
            for b in range(len(cu_seqlens_q) - 1):
                rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
                keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
                own = alibi_slopes
                if own is not None and own.ndim == 2:
                    own = own[b : b + 1]
                o, l = batch(  # noqa: E741
                    q[None, rows], k[None, keys], v[None, keys], alibi_slopes=own, **rest
                )
                outs.append(o[0])
                lses.append(l[0])
            out, lse = torch.cat(outs), torch.cat(lses, -1)
        return (out, lse) if return_lse else out

    return call


def attention_case(
    b=2,
    lq=33,
    lk=None,
    h=2,
    g=None,
    d=16,
    e=None,
    *,
    lengths=None,  # packed: (queries, keys) of each sequence
    alibi=None,  # "H" or "BH"
    sinks=False,
    bias=None,  # its shape, with None for the full size
    rotary=None,  # pairs
    stretch=1.0,  # of the tables: YaRN's do more than turn
    **attributes,
):
    lk, g, e = lq if lk is None else lk, h if g is None else g, d if e is None else e

    def inputs(generator):
        if lengths is None:
            rows, keys = (b, lq), (b, lk)
        else:
            rows, keys = (sum(q for q, _ in lengths),), (sum(k for _, k in lengths),)
        out = {
            "q": normal(generator, *rows, h, d),
            "k": normal(generator, *keys, g, d),
            "v": normal(generator, *keys, g, e),
        }
        if lengths is not None:
            for i, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
                ends = np.cumsum([0, *(pair[i] for pair in lengths)])
                out[name] = torch.tensor(ends, dtype=torch.int32)
        if alibi:
            shape = (h,) if alibi == "H" else (b if lengths is None else len(lengths), h)
            out["alibi_slopes"] = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.3
        if sinks:
            out["sinks"] = normal(generator, h)
        if bias is not None:
            full = (b, h, lq, lk)[4 - len(bias) :]
            shape = [f if s is None else s for s, f in zip(bias, full, strict=True)]
            out["bias"] = normal(generator, *shape)
        if rotary is not None:
            longest = lk if lengths is None else max(k for _, k in lengths)
            angle = torch.arange(longest + 2)[:, None] * 50.0 ** (-torch.arange(rotary) / rotary)
            angle = angle.double()
            out["rotary_cos"], out["rotary_sin"] = stretch * angle.cos(), stretch * angle.sin()
        return out

    options = {
        "lengths": lengths, "alibi": alibi, "sinks": sinks, "bias": bias, "rotary": rotary,
        "stretch": None if stretch == 1.0 else stretch,
        **attributes,
    }  # fmt: skip
    label = ",".join(f"{n}={v}" for n, v in options.items() if v not in (None, False))
    return Case(
        f"attention[{b}x{lq}x{lk}x{h}/{g}x{d}/{e}{',' + label if label else ''}]".replace(" ", ""),
        "attention",
        inputs,
        formula(**attributes),
        attributes,
        ("alibi_slopes", "sinks", "bias", "rotary_cos", "rotary_sin"),
        ("q", "k", "v", "sinks", "bias"),
        # Rounding a score of 10 to float32 moves its weight by 1e-6, and a tile's softmax is
        # rounded once more than a whole row's.
        floor=4e-6,
        gradient_floor=1e-5,
        sums=("sinks", "bias") if bias and (len(bias) < 4 or 1 in bias) else ("sinks",),
    )


# Every feature alone, then together.
FEATURES = [
    attention_case(),
    attention_case(causal=True),
    attention_case(lq=20, lk=45, causal=True),
    attention_case(lq=45, lk=20, causal=True),
    attention_case(lq=70, window=(7, 3)),
    attention_case(lq=70, window=(0, 0)),
    attention_case(lq=70, window=(5, -1)),
    attention_case(lq=70, window=(-1, 4)),
    attention_case(lq=70, window=(11, 40), causal=True),
    attention_case(lq=50, lk=20, window=(3, 2)),
    attention_case(scale=0.5),
    attention_case(scale=-0.3, causal=True),
    attention_case(softcap=2.0),
    attention_case(softcap=30.0, causal=True),
    attention_case(alibi="H"),
    attention_case(alibi="BH", causal=True, lq=20, lk=37),
    attention_case(sinks=True),
    attention_case(sinks=True, causal=True, lq=40, lk=20, return_lse=True),
    attention_case(bias=(None, None, None, None)),
    attention_case(bias=(1, None, None, None), causal=True),
    attention_case(bias=(None, 1, 1, None)),
    attention_case(bias=(None, None, 1), h=4, g=2),
    attention_case(bias=(None, 1)),
    attention_case(bias=(None,), return_lse=True),
    attention_case(bias=(1, 1, 1, 1)),
    attention_case(return_lse=True),
    attention_case(return_lse=True, causal=True, lq=40, lk=13),
    attention_case(h=6, g=2),
    attention_case(h=6, g=1, causal=True, return_lse=True),
    attention_case(rotary=8),
    attention_case(rotary=4, causal=True, lq=19, lk=40),
    attention_case(rotary=8, rotary_interleaved=True, h=4, g=2),
    attention_case(rotary=3, rotary_interleaved=True, d=16, causal=True),
    attention_case(rotary=8, stretch=6.0, scale=0.01),
    attention_case(lengths=((5, 5), (40, 40), (1, 1))),
    attention_case(lengths=((5, 9), (40, 17), (0, 3), (3, 0), (0, 0), (64, 130)), causal=True),
    attention_case(lengths=((70, 70), (33, 50)), window=(6, 2), h=4, g=2, return_lse=True),
    attention_case(lengths=((7, 20), (65, 70)), rotary=8, causal=True),
    attention_case(lengths=((7, 20), (65, 70)), alibi="BH", sinks=True, softcap=3.0),
    attention_case(deterministic=True, causal=True, h=4, g=2),
    attention_case(
        lq=37, lk=50, h=4, g=2, causal=True, softcap=4.0, alibi="H", sinks=True,
        bias=(1, None, None, None), rotary=8, return_lse=True,
    ),
    attention_case(
        lq=50, lk=60, h=4, g=1, e=24, window=(20, 9), softcap=4.0, alibi="BH", sinks=True,
        bias=(None, 1, None, None), rotary=4, rotary_interleaved=True, scale=0.4, return_lse=True,
    ),
]  # fmt: skip

# Sizes about the tiles' edges, and none at all.
SIZES = [
    attention_case(b=b, lq=lq, lk=lk, h=h, g=g, d=d, e=e, causal=causal)
    for causal in (False, True)
    for b, lq, lk, h, g, d, e in [
        (1, 1, 1, 1, 1, 1, 1),
        (1, 1, 77, 2, 1, 32, 32),
        (3, 2, 1, 1, 1, 8, 8),
        (1, 64, 64, 1, 1, 64, 64),
        (1, 63, 65, 2, 2, 64, 64),
        (2, 129, 131, 1, 1, 40, 40),
        (1, 128, 256, 1, 1, 128, 128),
        (1, 200, 70, 2, 1, 128, 64),
        (1, 65, 130, 1, 1, 64, 128),
        (1, 100, 100, 2, 2, 96, 96),
        (1, 40, 190, 1, 1, 192, 128),
        (1, 70, 70, 1, 1, 256, 256),
        (1, 30, 30, 1, 1, 17, 5),
        (1, 300, 300, 1, 1, 16, 16),
        (0, 5, 5, 2, 1, 8, 8),
        (2, 0, 5, 2, 1, 8, 8),
        (2, 5, 0, 2, 2, 8, 8),
        (2, 5, 5, 0, 1, 8, 8),
        (2, 5, 5, 2, 2, 8, 0),
    ]
]


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


# Long enough for many tiles of every kernel, short enough for the formula.
LONG = [
    attention_case(1, 700, h=2, g=1, d=64, causal=causal, window=window, softcap=softcap)
    for causal, window, softcap in itertools.product(
        (False, True), ((-1, -1), (130, 70)), (0.0, 5.0)
    )
] + [
    attention_case(1, 515, 777, h=2, g=1, d=128, causal=True),
    attention_case(1, 515, 777, h=2, g=2, d=128),
    attention_case(1, 400, h=1, d=256, causal=True),
    attention_case(lengths=((300, 300), (129, 260), (7, 511)), h=4, g=2, d=64, causal=True),
    attention_case(lengths=((300, 300), (129, 260), (7, 511)), h=2, g=2, d=128),
    # Each head size of the Hopper backward, and sizes that it pads.
    attention_case(1, 333, 400, h=2, g=1, d=96, causal=True, deterministic=True),
    attention_case(1, 333, h=1, d=80, window=(100, 30), sinks=True),
    attention_case(1, 333, h=1, d=48, e=32, causal=True),
    attention_case(1, 300, 400, h=2, g=1, d=192, e=128, causal=True, return_lse=True),
    attention_case(1, 333, h=1, d=160, e=192, window=(130, 70)),
    attention_case(1, 300, 450, h=2, g=1, d=256, causal=True, deterministic=True),
    attention_case(lengths=((150, 150), (65, 200)), h=2, g=1, d=96),
    attention_case(lengths=((150, 150), (65, 200)), h=2, g=1, d=192, e=128, causal=True),
    attention_case(lengths=((150, 150), (65, 200)), h=2, g=1, d=256, window=(60, 60)),
    # What the Hopper forward pads by whole columns of 64, and scores changed beside wide heads.
    attention_case(1, 300, h=1, d=64, e=200, window=(90, 40)),
    attention_case(1, 515, h=1, d=256, e=40, causal=True),
    attention_case(1, 333, 400, h=2, g=1, d=256, causal=True, softcap=5.0, alibi="H"),
    attention_case(1, 300, h=2, g=1, d=192, e=128, softcap=5.0, sinks=True),
    # So many short ones that a CPU writes their gradients past its caches.
    attention_case(18, 60, h=4, d=64, causal=True),
    attention_case(30, 50, 60, h=3, d=64, e=48, window=(20, 9)),
]


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

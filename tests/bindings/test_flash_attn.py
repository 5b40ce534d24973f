"""flashkernel.compat.flash_attn: flash-attn's own signatures, and their results against plain
torch."""

import inspect
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashkernel as fk
from flashkernel.compat import flash_attn

DEVICES = ["cpu"]
if torch.cuda.is_available() and fk.build_info()["gpus"]:
    DEVICES.append("cuda")

# As flash-attn 2.8 has them.
COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
BOTH = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *BOTH], {**COMMON, "block_table": None}),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *BOTH], COMMON),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*required, *defaults]
    assert all(parameters[n].default is inspect.Parameter.empty for n in required)
    assert {n: parameters[n].default for n in defaults} == defaults


def formula(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    """(out, lse) in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    (lq, heads, d), (lk, kv_heads) = q.shape[1:], k.shape[1:3]
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(lq)[:, None] + lk - lq - torch.arange(lk)
    distance = distance.to(q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[..., None, None] * distance.abs()
    left, right = (math.inf if w < 0 else w for w in window_size)
    right = 0 if causal else right
    s = s.masked_fill((distance > left) | (-distance > right), -math.inf)
    out = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1).nan_to_num(0.0), v)
    return out, torch.logsumexp(s, -1)


WINDOWS = [
    [2, 1],
    torch.tensor([2, 1]),
    torch.tensor([2, 1], dtype=torch.int32),
    np.array([2, 1]),
    (np.int64(2), np.int32(1)),
    (torch.tensor(2), 1),
]


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_windows_of_any_integers(window):
    """As flash-attn, which takes from the window two things that are integers."""
    q, k, v = torch.randn(3, 2, 7, 2, 8).unbind(0)
    options = {"window_size": window, "causal": False}
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(2, 1))
    lengths = torch.tensor([0, 7, 14], dtype=torch.int32)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    packed = flash_attn.flash_attn_varlen_func(*rows, lengths, lengths, 7, 7, **options)
    for out in (
        flash_attn.flash_attn_func(q, k, v, **options),
        flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options),
        flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options),
        flash_attn.flash_attn_with_kvcache(q, k, v, **options),
        packed.unflatten(0, (2, 7)),
    ):
        torch.testing.assert_close(out, expected)


def test_windows_below_zero_are_no_limit():
    q, k, v = torch.randn(3, 1, 7, 2, 8).unbind(0)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(2, -1))
    result = flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([2, -100]))
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("window", [None, 3, (1,), (1, 2, 3), (1.5, 2), torch.rand(2), "ab"])
def test_windows_that_are_none(window):
    q = torch.randn(1, 7, 2, 8)
    for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache):
        text = f"{function.__name__}: window_size: expected two integers, got"
        with pytest.raises(fk.Error, match=text):
            function(q, q, q, window_size=window)


def packed_formula(q, k, v, cu_q, cu_k, alibi_slopes=None, **options):
    outs, lses = [], []
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for i, (q0, q1) in enumerate(itertools.pairwise(ends_q)):
        one = slice(ends_k[i], ends_k[i + 1])
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[i]
        out, lse = formula(q[None, q0:q1], k[None, one], v[None, one], **options,
                           alibi_slopes=slopes)  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3, "softcap": 5.0},
    {"window_size": (3, 2)},
    {"causal": True, "window_size": (4, -1), "deterministic": True},
    {"alibi_slopes": "H"},
    {"causal": True, "alibi_slopes": "BH"},
]


def drawn(options, batch, heads, device):
    options = dict(options)
    if "alibi_slopes" in options:
        shape = (heads,) if options["alibi_slopes"] == "H" else (batch, heads)
        options["alibi_slopes"] = torch.rand(shape, device=device)
    expected = {n: v for n, v in options.items() if n != "deterministic"}
    return options, expected


def compare(function, leaves, expected):
    """Values and gradients of (out, lse, None), and of the call that returns out alone."""
    out, lse, nothing = function(return_attn_probs=True)
    assert nothing is None and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    alone = function()
    torch.testing.assert_close(alone, out)
    weights = torch.randn(out.shape, device=out.device)
    ours = torch.autograd.grad((alone * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected[0] * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_batches(device, options):
    torch.manual_seed(0)
    options, plain = drawn(options, 2, 4, device)
    q = torch.randn(2, 9, 4, 16, device=device, requires_grad=True)
    kv = torch.randn(2, 13, 2, 2, 16, device=device, requires_grad=True)
    qkv = torch.randn(2, 11, 3, 4, 16, device=device, requires_grad=True)
    k, v = kv.unbind(2)
    expected = formula(q, k, v, **plain)
    compare(lambda **kw: flash_attn.flash_attn_func(q, k, v, **options, **kw), (q, kv), expected)
    expected = formula(q, k, v, **plain)
    compare(
        lambda **kw: flash_attn.flash_attn_kvpacked_func(q, kv, **options, **kw), (q, kv), expected
    )
    expected = formula(*qkv.unbind(2), **plain)
    compare(
        lambda **kw: flash_attn.flash_attn_qkvpacked_func(qkv, **options, **kw), (qkv,), expected
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, options):
    torch.manual_seed(0)
    options, plain = drawn(options, 3, 4, device)
    cu_q = torch.tensor([0, 4, 5, 12], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 6, 9, 17], dtype=torch.int32, device=device)
    q = torch.randn(12, 4, 16, device=device, requires_grad=True)
    kv = torch.randn(17, 2, 2, 16, device=device, requires_grad=True)
    qkv = torch.randn(12, 3, 4, 16, device=device, requires_grad=True)
    k, v = kv.unbind(1)
    lengths = (cu_q, cu_k, 7, 8)
    expected = packed_formula(q, k, v, cu_q, cu_k, **plain)
    compare(
        lambda **kw: flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options, **kw),
        (q, kv),
        expected,
    )
    expected = packed_formula(q, k, v, cu_q, cu_k, **plain)
    compare(
        lambda **kw: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **options, **kw),
        (q, kv),
        expected,
    )
    expected = packed_formula(*qkv.unbind(1), cu_q, cu_q, **plain)
    compare(
        lambda **kw: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 7, **options, **kw),
        (qkv,),
        expected,
    )


def rotated(x, angles, places, interleaved):
    """x (L, H, D) by the angles (Lmax, R) at its tokens' places, in complex numbers."""
    r = angles.shape[1]
    pairs = x[..., : 2 * r].unflatten(-1, (r, 2) if interleaved else (2, r))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turn = torch.polar(torch.ones(len(places), 1, r), angles[places][:, None])
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), x[..., 2 * r :]], -1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths, rows", [([5, 5], None), ([0, 7], None), ([3, 7], [2, 0])])
def test_cache(lengths, rows, options):
    """Two tokens a sequence, behind caches that hold NaN from there on."""
    torch.manual_seed(0)
    options = drawn(options, 2, 4, "cpu")[1]
    caches = torch.randn(2, 2 if rows is None else 3, 9, 2, 16)
    own_rows = rows or [0, 1]
    for row, n in zip(own_rows, lengths, strict=True):
        caches[:, row, n:] = math.nan
    expected = caches.clone()
    q, k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
    angles, interleaved = torch.randn(9, 4), rows is None
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, angles.cos(), angles.sin(), torch.tensor(lengths, dtype=torch.int32),
        rows and torch.tensor(rows, dtype=torch.int32), rotary_interleaved=interleaved,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    masked = "causal" in options or "window_size" in options
    for b, (row, n) in enumerate(zip(own_rows, lengths, strict=True)):
        expected[0, row, n : n + 2] = rotated(k[b], angles, [n, n + 1], interleaved)
        expected[1, row, n : n + 2] = v[b]
        turned = rotated(q[b], angles, [n, n + 1] if masked else [n, n], interleaved)
        own = dict(options)
        if options.get("alibi_slopes", q).ndim == 2:
            own["alibi_slopes"] = options["alibi_slopes"][b]
        y, logsumexp = formula(turned[None], *expected[:, row, None, : n + 2], **own)
        torch.testing.assert_close(out[b].double(), y[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), logsumexp[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches, expected, equal_nan=True)


def test_cache_as_it_is():
    q, caches = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 9, 2, 16)
    call = flash_attn.flash_attn_with_kvcache
    expected = flash_attn.flash_attn_func(q, *caches, causal=True)
    torch.testing.assert_close(call(q, *caches, causal=True), expected)
    expected = flash_attn.flash_attn_func(q, *caches[:, :, :4])
    for length in (4, torch.tensor(4, dtype=torch.int32)):
        torch.testing.assert_close(call(q, *caches, cache_seqlens=length), expected)
    none = torch.zeros(0, dtype=torch.int32)
    assert call(q[:0], *caches[:, :0], cache_seqlens=none).shape == (0, 3, 4, 16)
    assert call(q[:0], *caches, cache_batch_idx=none).shape == (0, 3, 4, 16)


def test_arguments_by_position():
    """Every argument where flash-attn has it."""
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    slopes = torch.rand(2)
    values = (0.0, 0.5, True, (3, 0), 4.0, slopes, True)
    expected, lse = formula(q, k, v, 0.5, True, (3, 0), 4.0, slopes)
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    kv, qkv = torch.stack((k, v), 2), torch.stack((q, k, v), 2)
    for out, ours in (
        flash_attn.flash_attn_func(q, k, v, *values, True)[:2],
        flash_attn.flash_attn_kvpacked_func(q, kv, *values, True)[:2],
        flash_attn.flash_attn_qkvpacked_func(qkv, *values, True)[:2],
    ):
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.double(), lse, rtol=1e-5, atol=1e-5)
    both = (offsets, offsets, 6, 6)
    for out, ours in (
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *both, *values, True, None)[:2],
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], kv[0], *both, *values, True)[:2],
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], offsets, 6, *values, True)[:2],
    ):
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.double(), lse[0], rtol=1e-5, atol=1e-5)


def test_compiled():
    qkv = torch.randn(1, 6, 3, 2, 8, requires_grad=True)

    def call(qkv):
        return flash_attn.flash_attn_qkvpacked_func(qkv, causal=True) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(qkv)
    torch.testing.assert_close(compiled, call(qkv))


def test_errors():
    q = torch.randn(1, 4, 2, 8)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(fk.Error, match="flash_attn_func: dropout_p: expected 0.*got 0.1"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(fk.Error, match="flash_attn_varlen_func: dropout_p: expected 0.*got 0.1"):
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 4, 4, 0.1)
    with pytest.raises(fk.Error, match="flash_attn_varlen_func: block_table: expected None"):
        flash_attn.flash_attn_varlen_func(
            q[0], q[0], q[0], offsets, offsets, 4, 4, block_table=torch.zeros(1, 1)
        )
    cache = flash_attn.flash_attn_with_kvcache
    for name in ("block_table", "cache_leftpad"):
        with pytest.raises(NotImplementedError, match=f"with_kvcache: {name}: expected None"):
            cache(q, q, q, **{name: torch.zeros(1, 1)})
    with pytest.raises(fk.Error, match="cache_seqlens: expected a value where there is k"):
        cache(q, q, q, q, q)
    with pytest.raises(fk.Error, match=r"cache_seqlens: expected 1 lengths from 0 to 0, got \[1\]"):
        cache(q, q, q, q, q, cache_seqlens=1)
    with pytest.raises(fk.Error, match=r"k: expected \(\(1, 4, 2, 8\).* got \(\(1, 4, 1, 8\)"):
        cache(q, q, q, q[:, :, :1], q, cache_seqlens=0)
    rows, two = torch.zeros(3, 6, 2, 8), torch.randn(2, 4, 2, 8)
    for lengths in (0, torch.tensor([0, 1], dtype=torch.int32)):
        for caches in ((rows, rows), (rows[:1], rows[:1])):
            with pytest.raises(fk.Error, match="k_cache: expected 2 rows.* got [13]"):
                cache(two, *caches, two, two, cache_seqlens=lengths)
        with pytest.raises(fk.Error, match=r"v_cache: expected \(3, 6, 2\), as k_cache has"):
            cache(two, rows, rows[:2], two, two, cache_seqlens=lengths)
        for index in ([0, 3], [0, -1], [0], [[0, 1]]):
            with pytest.raises(fk.Error, match="cache_batch_idx: expected 2 rows from 0 to 2"):
                index = torch.tensor(index)
                cache(two, rows, rows, two, two, cache_seqlens=lengths, cache_batch_idx=index)
    assert not rows.any()
    with pytest.raises(fk.Error, match="rotary_cos: expected None where there is no k"):
        cache(q, q, q, rotary_cos=q, rotary_sin=q)
    with pytest.raises(fk.Error, match=r"flash_attn_qkvpacked_func: qkv: expected 5.*\(1, 4, 2, 8"):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(fk.Error, match="attention: k: expected"):
        flash_attn.flash_attn_func(q, q[..., :4], q)


def test_modules_are_found_by_name():
    """Of the package, as of `import flashkernel.compat.flash_attn`."""
    script = "import flashkernel as fk; print(fk.compat.flash_attn, fk.compat.mamba_ssm)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not hasattr(fk.compat, "xformers")

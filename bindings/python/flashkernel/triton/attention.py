"""Attention in Triton, forward and backward: tile by tile, so that no score leaves the chip.

A program of the forward takes BLOCK_M queries of one head and walks over its keys, BLOCK_N at a
time, with a running maximum and sum (the online softmax). The backward computes the scores again
from q, k and lse: one kernel walks over queries for dk and dv, one over keys for dq, so that every
gradient is summed by one program in a fixed order. Products of half-precision inputs run on tensor
cores, and so do those of float32 inputs, in three parts each.

Floor: 4 L^2 D FLOPs per head forward, 14 L^2 D backward (7 products; 5 if dq were summed beside
dk), half of that if causal; memory traffic is small beside it."""

import math

import torch
import triton
import triton.language as tl

from .. import Error
from ._device import dot, dot_add, takes, tuned

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_INFINITY = tl.constexpr(float("inf"))


def _tuned(*tiles):
    """Tries (BLOCK_M, BLOCK_N, warps, stages) once for each head size and dtype. The last two are
    for what leaves no room for the others, float32 and heads above 128, and the last for both."""

    def fitting(configurations, arguments, **constants):
        large = max(constants["BLOCK_D"], constants["BLOCK_E"]) > 128
        if arguments["q"].dtype == torch.float32:
            return configurations[-1:] if large else configurations[-2:]
        return configurations[-2:] if large else configurations[:-2]

    configurations = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
    ]
    return tuned(configurations, ["BLOCK_D", "BLOCK_E"], fitting)


# --- tiles ----------------------------------------------------------------------------------------


@triton.jit
def _load(
    base, row, rows, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr = False,
):  # fmt: skip
    """Rows [row, row + TILE) of a (rows, SIZE) matrix, zeros outside of it. FULL: there are as many
    rows."""
    r = tl.arange(0, TILE)
    c = tl.arange(0, BLOCK)
    pointers = base + tl.cast(row, tl.int64) * stride + r[:, None] * stride + c[None, :]
    if FULL and SIZE == BLOCK:
        tile = tl.load(pointers)
    else:
        inside = (row + r < rows)[:, None] & (c < SIZE)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(
    base, value, row, rows, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    r = tl.arange(0, TILE)
    c = tl.arange(0, BLOCK)
    pointers = base + tl.cast(row, tl.int64) * stride + r[:, None] * stride + c[None, :]
    inside = (row + r < rows)[:, None] & (c < SIZE)[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _seen(query, key, q_len, k_len, CAUSAL: tl.constexpr):
    """Which queries see which keys; query and key are a column and a row of indices, or the
    other way round. Causal is aligned to the bottom right."""
    seen = key < k_len
    if CAUSAL:
        seen = seen & (key <= query + (k_len - q_len))
    return seen


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _attend(
    total, maximum, out, q, k, v, k_stride, v_stride, query, begin, end, q_len, k_len, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One walk over the keys [begin, end): the softmax's running sum and maximum (of scores times
    log2 e), and the weighted values. scale is positive."""
    for start in tl.range(begin, end, BLOCK_N):
        k_tile = _load(k, start, k_len, k_stride, D, BLOCK_D, BLOCK_N, not MASKED)
        s = dot(q, tl.trans(k_tile))
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            s = tl.where(_seen(query[:, None], key[None, :], q_len, k_len, CAUSAL), s, -_INFINITY)
        grown = tl.maximum(maximum, tl.max(s, 1) * scale)
        # A query that has seen no key yet: no difference below may be inf - inf.
        shift = tl.where(grown == -_INFINITY, 0.0, grown) if MASKED else grown
        p = tl.exp2(s * scale - shift[:, None])
        shrink = tl.exp2(maximum - shift)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _load(v, start, k_len, v_stride, E, BLOCK_E, BLOCK_N, not MASKED)
        out = dot_add(p.to(v_tile.dtype), v_tile, out * shrink[:, None])
        maximum = grown
    return total, maximum, out


@_tuned((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 32, 4, 2), (32, 16, 4, 1))
@triton.jit
def _forward(
    q, k, v, out, lse, scale, heads, group, q_len, k_len,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The last queries see the most keys: they go first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    b = tl.cast(tl.program_id(0) // heads, tl.int64)
    h = tl.cast(tl.program_id(0) % heads, tl.int64)
    q += b * q_batch + h * q_head
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    query = first + tl.arange(0, BLOCK_M)
    q_tile = _load(q, first, q_len, q_row, D, BLOCK_D, BLOCK_M)

    # Keys that every query of the tile sees, then those that some do.
    end = k_len
    full = k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(k_len, first + BLOCK_M + k_len - q_len), 0)
        full = tl.maximum(tl.minimum(full, first + 1 + k_len - q_len), 0) // BLOCK_N * BLOCK_N
    total = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], -_INFINITY, tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total, maximum, accumulator = _attend(
        total, maximum, accumulator, q_tile, k, v, k_row, v_row, query, 0, full, q_len, k_len,
        scale * _LOG2E, D, E, BLOCK_D, BLOCK_E, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    total, maximum, accumulator = _attend(
        total, maximum, accumulator, q_tile, k, v, k_row, v_row, query, full, end, q_len, k_len,
        scale * _LOG2E, D, E, BLOCK_D, BLOCK_E, BLOCK_N, CAUSAL, True,
    )  # fmt: skip

    # A query that sees no key gives 0, with lse = -inf.
    accumulator /= tl.where(total == 0.0, 1.0, total)[:, None]
    out += b * out_batch + h * out_head
    _store(out, accumulator, first, q_len, out_row, E, BLOCK_E, BLOCK_M)
    lse += tl.cast(tl.program_id(0), tl.int64) * q_len
    tl.store(lse + query, (maximum + tl.log2(total)) * _LN2, mask=query < q_len)


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def _row_sums(
    out, dout, dlse, delta, heads, q_len,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = sum(dout * out) - dlse: what is taken from each gradient of a probability."""
    first = tl.program_id(1) * BLOCK_M
    b = tl.cast(tl.program_id(0) // heads, tl.int64)
    h = tl.cast(tl.program_id(0) % heads, tl.int64)
    out += b * out_batch + h * out_head
    dout += b * dout_batch + h * dout_head
    o = _load(out, first, q_len, out_row, E, BLOCK_E, BLOCK_M).to(tl.float32)
    do = _load(dout, first, q_len, dout_row, E, BLOCK_E, BLOCK_M).to(tl.float32)
    result = tl.sum(o * do, 1)
    query = first + tl.arange(0, BLOCK_M)
    offset = tl.cast(tl.program_id(0), tl.int64) * q_len
    if HAS_DLSE:
        result -= tl.load(dlse + offset + query, mask=query < q_len, other=0.0)
    tl.store(delta + offset + query, result, mask=query < q_len)


@triton.jit
def _load_lse(lse, query, q_len):
    """lse times log2 e. +inf where there is no query or it sees no key: its probabilities are 0."""
    value = tl.load(lse + query, mask=query < q_len, other=_INFINITY)
    return tl.where(value == -_INFINITY, _INFINITY, value * _LOG2E)


@triton.jit
def _gather_dkv(
    dk, dv, k_tile, v_tile, q, dout, lse, delta, q_row, dout_row, key, begin, end, q_len, k_len,
    scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One walk over the queries [begin, end), with all tiles transposed: keys down, queries
    across."""
    for start in tl.range(begin, end, BLOCK_M):
        query = start + tl.arange(0, BLOCK_M)
        q_tile = _load(q, start, q_len, q_row, D, BLOCK_D, BLOCK_M)
        s = dot(k_tile, tl.trans(q_tile)) * scale
        p = tl.exp2(s - _load_lse(lse, query, q_len)[None, :])
        if MASKED:
            p = tl.where(_seen(query[None, :], key[:, None], q_len, k_len, CAUSAL), p, 0.0)
        do_tile = _load(dout, start, q_len, dout_row, E, BLOCK_E, BLOCK_M)
        dv = dot_add(p.to(do_tile.dtype), do_tile, dv)
        dp = dot(v_tile, tl.trans(do_tile))
        ds = p * (dp - tl.load(delta + query, mask=query < q_len, other=0.0)[None, :])
        dk = dot_add(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@_tuned((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 4, 3), (32, 64, 4, 2), (16, 32, 4, 1))
@triton.jit
def _backward_dkv(
    q, k, v, dout, lse, delta, dk, dv, scale, heads, group, q_len, k_len,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    dout_batch, dout_row, dout_head,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    kv_heads = heads // group
    b = tl.cast(tl.program_id(0) // kv_heads, tl.int64)
    g = tl.cast(tl.program_id(0) % kv_heads, tl.int64)
    key = first + tl.arange(0, BLOCK_N)
    k_tile = _load(k + b * k_batch + g * k_head, first, k_len, k_row, D, BLOCK_D, BLOCK_N)
    v_tile = _load(v + b * v_batch + g * v_head, first, k_len, v_row, E, BLOCK_E, BLOCK_N)

    # The first queries that see a key of the tile, then those that see all of them.
    begin = 0
    full = 0
    if CAUSAL:
        begin = tl.maximum(first - (k_len - q_len), 0) // BLOCK_M * BLOCK_M
        full = tl.maximum(first + BLOCK_N - 1 - (k_len - q_len), 0)
        full = tl.minimum(tl.cdiv(full, BLOCK_M), tl.cdiv(q_len, BLOCK_M)) * BLOCK_M
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for member in tl.range(0, group):
        h = g * group + member
        q_of = q + b * q_batch + h * q_head
        dout_of = dout + b * dout_batch + h * dout_head
        at = (b * heads + h) * q_len
        dk_tile, dv_tile = _gather_dkv(
            dk_tile, dv_tile, k_tile, v_tile, q_of, dout_of, lse + at, delta + at, q_row, dout_row,
            key, begin, full, q_len, k_len, scale * _LOG2E,
            D, E, BLOCK_D, BLOCK_E, BLOCK_M, CAUSAL, True,
        )  # fmt: skip
        dk_tile, dv_tile = _gather_dkv(
            dk_tile, dv_tile, k_tile, v_tile, q_of, dout_of, lse + at, delta + at, q_row, dout_row,
            key, full, q_len, q_len, k_len, scale * _LOG2E,
            D, E, BLOCK_D, BLOCK_E, BLOCK_M, CAUSAL, False,
        )  # fmt: skip
    dk += b * dk_batch + g * dk_head
    dv += b * dv_batch + g * dv_head
    _store(dk, dk_tile * scale, first, k_len, dk_row, D, BLOCK_D, BLOCK_N)
    _store(dv, dv_tile, first, k_len, dv_row, E, BLOCK_E, BLOCK_N)


@triton.jit
def _gather_dq(
    dq, q_tile, do_tile, lse, delta, k, v, k_row, v_row, query, begin, end, q_len, k_len, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One walk over the keys [begin, end)."""
    for start in tl.range(begin, end, BLOCK_N):
        k_tile = _load(k, start, k_len, k_row, D, BLOCK_D, BLOCK_N, not MASKED)
        s = dot(q_tile, tl.trans(k_tile)) * scale
        p = tl.exp2(s - lse[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            p = tl.where(_seen(query[:, None], key[None, :], q_len, k_len, CAUSAL), p, 0.0)
        v_tile = _load(v, start, k_len, v_row, E, BLOCK_E, BLOCK_N, not MASKED)
        dp = dot(do_tile, tl.trans(v_tile))
        ds = p * (dp - delta[:, None])
        dq = dot_add(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@_tuned((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 4, 3), (64, 32, 4, 2), (32, 16, 4, 1))
@triton.jit
def _backward_dq(
    q, k, v, dout, lse, delta, dq, scale, heads, group, q_len, k_len,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    dout_batch, dout_row, dout_head, dq_batch, dq_row, dq_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    b = tl.cast(tl.program_id(0) // heads, tl.int64)
    h = tl.cast(tl.program_id(0) % heads, tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    at = tl.cast(tl.program_id(0), tl.int64) * q_len
    query = first + tl.arange(0, BLOCK_M)
    q_tile = _load(q + b * q_batch + h * q_head, first, q_len, q_row, D, BLOCK_D, BLOCK_M)
    do_tile = _load(
        dout + b * dout_batch + h * dout_head, first, q_len, dout_row, E, BLOCK_E, BLOCK_M
    )
    lse_tile = _load_lse(lse + at, query, q_len)
    delta_tile = tl.load(delta + at + query, mask=query < q_len, other=0.0)

    end = k_len
    full = k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(k_len, first + BLOCK_M + k_len - q_len), 0)
        full = tl.maximum(tl.minimum(full, first + 1 + k_len - q_len), 0) // BLOCK_N * BLOCK_N
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_tile = _gather_dq(
        dq_tile, q_tile, do_tile, lse_tile, delta_tile, k, v, k_row, v_row, query, 0, full,
        q_len, k_len, scale * _LOG2E, D, E, BLOCK_D, BLOCK_E, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    dq_tile = _gather_dq(
        dq_tile, q_tile, do_tile, lse_tile, delta_tile, k, v, k_row, v_row, query, full, end,
        q_len, k_len, scale * _LOG2E, D, E, BLOCK_D, BLOCK_E, BLOCK_N, CAUSAL, True,
    )  # fmt: skip
    dq += b * dq_batch + h * dq_head
    _store(dq, dq_tile * scale, first, q_len, dq_row, D, BLOCK_D, BLOCK_M)


# --- torch ----------------------------------------------------------------------------------------


def _strides(*tensors) -> list[int]:
    """Of batch, row and head."""
    return [stride for t in tensors for stride in t.stride()[:3]]


def _unit_rows(t):
    """The kernels take any strides but that of the last dim."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        q, k, v = (_unit_rows(t) for t in (q, k, v))
        batch, q_len, heads, d = q.shape
        k_len, kv_heads, e = k.shape[1], k.shape[2], v.shape[3]
        out = q.new_empty(batch, q_len, heads, e)
        lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.sizes = (heads, heads // max(kv_heads, 1), q_len, k_len)
        # Triton 3.6 makes of tiles narrower than 64 columns, where rows are not aligned, code that
        # reads out of bounds.
        ctx.constants = {
            "D": d,
            "E": e,
            "BLOCK_D": max(64, triton.next_power_of_2(d)),
            "BLOCK_E": max(64, triton.next_power_of_2(e)),
            "CAUSAL": causal,
        }
        ctx.scale = scale
        if lse.numel():
            _forward[lambda c: (batch * heads, triton.cdiv(q_len, c["BLOCK_M"]))](
                q, k, v, out, lse, scale, *ctx.sizes, *_strides(q, k, v, out), **ctx.constants
            )
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        batch, (heads, group, q_len, k_len) = q.shape[0], ctx.sizes
        if not (batch and heads and q_len and k_len):
            return dq.zero_(), dk.zero_(), dv.zero_(), None, None
        dout = torch.zeros_like(out) if dout is None else _unit_rows(dout)
        delta = torch.empty_like(lse)
        constants = ctx.constants
        _row_sums[(batch * heads, triton.cdiv(q_len, 64))](
            out, dout, lse if dlse is None else dlse.contiguous(), delta, heads, q_len,
            *_strides(out, dout),
            E=constants["E"], BLOCK_E=constants["BLOCK_E"], HAS_DLSE=dlse is not None, BLOCK_M=64,
        )  # fmt: skip
        given = (q, k, v, dout, lse, delta)
        _backward_dkv[lambda c: (batch * heads // group, triton.cdiv(k_len, c["BLOCK_N"]))](
            *given, dk, dv, ctx.scale, *ctx.sizes, *_strides(q, k, v, dout, dk, dv), **constants
        )
        _backward_dq[lambda c: (batch * heads, triton.cdiv(q_len, c["BLOCK_M"]))](
            *given, dq, ctx.scale, *ctx.sizes, *_strides(q, k, v, dout, dq), **constants
        )
        return dq, dk, dv, None, None


def attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    """softmax(scale * q k^T) v of q (B, Lq, H, D), k (B, Lk, G, D) and v (B, Lk, G, E), with H a
    multiple of G, on the GPU: as `flashkernel.attention`, and differentiable as it is.

    causal: query i sees the keys up to i + Lk - Lq. scale: None is 1 / sqrt(D). return_lse: return
    the logarithm of the softmax's denominator too, float32 (B, H, Lq)."""
    _check(q, k, v)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    if scale <= 0:  # the kernels take the maximum before they scale
        q, scale = (-q, -scale) if scale < 0 else (0 * q, 1.0)
    out, lse = _Attention.apply(q, k, v, bool(causal), scale)
    return (out, lse) if return_lse else out


def _check(q, k, v) -> None:
    def wrong(name, expected, got):
        raise Error(f"triton.attention: {name}: expected {expected}, got {got}")

    for name, t in {"q": q, "k": k, "v": v}.items():
        if not isinstance(t, torch.Tensor) or not takes(t.device):
            wrong(name, "a torch tensor on a GPU", getattr(t, "device", type(t).__name__))
        if t.ndim != 4:
            wrong(name, "4 dimensions", t.ndim)
        if t.dtype not in (torch.float32, torch.float16, torch.bfloat16) or t.dtype != q.dtype:
            wrong(name, "float32, float16 or bfloat16, as q has", t.dtype)
        if t.shape[-1] > 256:
            wrong(name, "a last size of at most 256", t.shape[-1])
    batch, _, heads, d = q.shape
    if k.shape[0] != batch or k.shape[-1] != d:
        wrong("k", f"shape ({batch}, Lk, G, {d})", tuple(k.shape))
    if v.shape[:3] != k.shape[:3]:
        wrong("v", f"shape {(*k.shape[:3], 'E')}", tuple(v.shape))
    if k.shape[2] == 0 or heads % k.shape[2]:
        wrong("k", f"a number of heads that divides q's {heads}", k.shape[2])

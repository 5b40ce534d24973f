"""Mamba-2's scan in Triton, forward and backward: the readable comparison to the kernels of
`flashkernel.ssd`.

A program takes one head of one sequence and walks through its chunks. Inside a chunk the recurrence
is a masked product of matrices, (C B^T o decays o dt) x; from chunk to chunk the state, (P, N), is
carried in registers. The forward keeps the state before each chunk; the backward goes through the
chunks from the last. dB and dC are stored by head and added up over the heads of a group
afterwards, in order.

Floor: a chunk of T steps costs T P (T + 2 N) + T T N multiply-adds. C B^T is computed again for
each head, and the part above the diagonal in vain: faster kernels share the one and skip the
other."""

import torch
import triton
import triton.language as tl

from .. import Error
from .selective_scan import _softplus

_CHUNK = 32


@triton.jit
def _rows(base, t, length, columns, stride, BLOCK: tl.constexpr):
    """A (steps, columns) tile in float32; 0 outside."""
    c = tl.arange(0, BLOCK)
    inside = (t[:, None] < length) & (c[None, :] < columns)
    at = base + t[:, None].to(tl.int64) * stride + c[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(base, value, t, length, columns, stride, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    inside = (t[:, None] < length) & (c[None, :] < columns)
    at = base + t[:, None].to(tl.int64) * stride + c[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _decays(raw, A, inside, SOFTPLUS: tl.constexpr, BLOCK_T: tl.constexpr):
    """dt of a chunk, 0 outside; the logarithms of decays up to each step and of the whole; and the
    decays between steps, whose exponents are masked before they are taken."""
    dt = tl.where(inside, _softplus(raw) if SOFTPLUS else raw, 0.0)
    sums = tl.cumsum(dt * A, 0)
    whole = tl.sum(dt * A, 0)
    i = tl.arange(0, BLOCK_T)
    seen = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))
    return dt, sums, whole, between


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _forward(
    x, dt, A, B, C, D, bias, y, states, length, heads, groups, P, N, chunks,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = h // (heads // groups)
    x += (b * length * heads + h) * P
    y += (b * length * heads + h) * P
    dt += b * length * heads + h
    B += (b * length * groups + group) * N
    C += (b * length * groups + group) * N
    a = tl.load(A + h)
    skip = tl.load(D + h).to(tl.float32) if HAS_D else 0.0
    shift = tl.load(bias + h).to(tl.float32) if HAS_BIAS else 0.0
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    kept = (p[:, None] < P) & (n[None, :] < N)
    states += (b * heads + h) * chunks * P * N
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for i in range(chunks):
        t = i * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = t < length
        tl.store(states + i * P * N + p[:, None] * N + n[None, :], state, mask=kept)
        raw = tl.load(dt + t * heads, mask=inside, other=0.0).to(tl.float32) + shift
        step, sums, whole, between = _decays(raw, a, inside, SOFTPLUS, BLOCK_T)
        xs = _rows(x, t, length, P, heads * P, BLOCK_P)
        Bs = _rows(B, t, length, N, groups * N, BLOCK_N)
        Cs = _rows(C, t, length, N, groups * N, BLOCK_N)
        matrix = _product(Cs, tl.trans(Bs)) * between * step[None, :]
        out = _product(matrix, xs) + tl.exp(sums)[:, None] * _product(Cs, tl.trans(state))
        _store_rows(y, out + skip * xs, t, length, P, heads * P, BLOCK_P)
        weight = tl.exp(whole - sums) * step
        state = tl.exp(whole) * state + _product(tl.trans(xs), Bs * weight[:, None])


@triton.jit
def _backward(
    dy, x, dt, A, B, C, D, bias, states, dx, ddt, dA, dB, dC, dD, dbias,
    length, heads, groups, P, N, chunks,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = h // (heads // groups)
    program = b * heads + h
    own = (b * length * heads + h) * P
    x, dy, dx = x + own, dy + own, dx + own
    dt, ddt = dt + b * length * heads + h, ddt + b * length * heads + h
    B += (b * length * groups + group) * N
    C += (b * length * groups + group) * N
    dB += (b * length * heads + h) * N
    dC += (b * length * heads + h) * N
    a = tl.load(A + h)
    skip = tl.load(D + h).to(tl.float32) if HAS_D else 0.0
    shift = tl.load(bias + h).to(tl.float32) if HAS_BIAS else 0.0
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    kept = (p[:, None] < P) & (n[None, :] < N)
    states += program * chunks * P * N
    row = tl.arange(0, BLOCK_T)
    dstate = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    total_A, total_D, total_bias = 0.0, 0.0, 0.0
    for k in range(chunks):
        i = chunks - 1 - k
        t = i * BLOCK_T + row
        inside = t < length
        state = tl.load(states + i * P * N + p[:, None] * N + n[None, :], mask=kept, other=0.0)
        raw = tl.load(dt + t * heads, mask=inside, other=0.0).to(tl.float32) + shift
        step, sums, whole, between = _decays(raw, a, inside, SOFTPLUS, BLOCK_T)
        xs = _rows(x, t, length, P, heads * P, BLOCK_P)
        dys = _rows(dy, t, length, P, heads * P, BLOCK_P)
        Bs = _rows(B, t, length, N, groups * N, BLOCK_N)
        Cs = _rows(C, t, length, N, groups * N, BLOCK_N)
        grown, tail = tl.exp(sums), tl.exp(whole - sums)
        scores = _product(Cs, tl.trans(Bs)) * between
        change = _product(dys, tl.trans(xs)) * between
        # What each pair of steps is worth, and the decays that are in it.
        worth = change * _product(Cs, tl.trans(Bs))
        later = tl.cumsum(worth * step[None, :], 0, reverse=True)
        rate = tl.sum(tl.where(row[None, :] < row[:, None], later, 0.0), 1)
        from_state = _product(dys, state) * grown[:, None]  # (T, N)
        to_state = _product(xs, dstate) * tail[:, None]
        begun = tl.sum(from_state * Cs, 1)
        ended = tl.sum(to_state * Bs, 1)
        through = tl.exp(whole) * tl.sum(tl.sum(state * dstate, 1), 0)
        rate += tl.cumsum(begun, 0, reverse=True) + through
        rate += tl.cumsum(ended * step, 0) - ended * step
        gradient = rate * a + tl.sum(worth, 0) + ended
        total_A += tl.sum(rate * step, 0)
        if SOFTPLUS:
            gradient = gradient / (1.0 + tl.exp(-raw))
        gradient = tl.where(inside, gradient, 0.0)
        total_bias += tl.sum(gradient, 0)
        total_D += tl.sum(tl.sum(dys * xs, 1), 0)
        tl.store(ddt + t * heads, gradient.to(ddt.dtype.element_ty), mask=inside)
        taken = _product(tl.trans(scores), dys)
        taken += _product(Bs, tl.trans(dstate)) * tail[:, None]
        _store_rows(dx, taken * step[:, None] + skip * dys, t, length, P, heads * P, BLOCK_P)
        dscores = change * step[None, :]
        _store_rows(dC, from_state + _product(dscores, Bs), t, length, N, heads * N, BLOCK_N)
        summed = to_state * step[:, None] + _product(tl.trans(dscores), Cs)
        _store_rows(dB, summed, t, length, N, heads * N, BLOCK_N)
        dstate = tl.exp(whole) * dstate + _product(tl.trans(dys * grown[:, None]), Cs)
    tl.store(dA + program, total_A)
    tl.store(dD + program, total_D)
    tl.store(dbias + program, total_bias)


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, dt_bias, dt_softplus):
        batch, length, heads, P = x.shape
        groups, N = B.shape[2:]
        x, dt, B, C = (t.contiguous() for t in (x, dt, B, C))
        chunks = triton.cdiv(length, _CHUNK)
        blocks = (max(16, triton.next_power_of_2(P)), max(16, triton.next_power_of_2(N)))
        y = torch.empty_like(x)
        states = torch.empty(batch, heads, chunks, P, N, device=x.device)
        sizes = (length, heads, groups, P, N, chunks)
        flags = (D is not None, dt_bias is not None, dt_softplus, _CHUNK, *blocks)
        if batch * heads * length > 0:
            _forward[batch, heads](x, dt, A, B, C, D, dt_bias, y, states, *sizes, *flags)
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, states)
        ctx.sizes, ctx.flags = sizes, flags
        return y

    @staticmethod
    def backward(ctx, dy):
        x, dt, A, B, C, D, dt_bias, states = ctx.saved_tensors
        batch, length, heads, _ = x.shape
        groups, N = B.shape[2:]
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        dB, dC = (torch.empty(batch, length, heads, N, device=x.device) for _ in range(2))
        sums = [torch.zeros(batch, heads, device=x.device) for _ in range(3)]
        dA, dD, dbias = sums
        if batch * heads * length > 0:
            _backward[batch, heads](
                dy.contiguous(), x, dt, A, B, C, D, dt_bias, states, dx, ddt, dA, dB, dC, dD, dbias,
                *ctx.sizes, *ctx.flags,
            )  # fmt: skip
        dB, dC = (t.unflatten(2, (groups, -1)).sum(3).to(x.dtype) for t in (dB, dC))
        dA, dD, dbias = (t.sum(0) for t in sums)
        dD = None if D is None else dD.to(D.dtype)
        return dx, ddt, dA, dB, dC, dD, None if dt_bias is None else dbias.to(dt_bias.dtype), None


def ssd(x, dt, A, B, C, D=None, *, z=None, dt_bias=None, dt_softplus=False):
    """As `flashkernel.ssd`, of whole sequences from states of 0, with D (H); its gradients too."""
    if x.ndim != 4 or B.ndim != 4 or B.shape != C.shape:
        raise Error(
            "ssd: expected x (B, L, H, P) and B, C (B, L, G, N), got shapes "
            f"{tuple(x.shape)}, {tuple(B.shape)}, {tuple(C.shape)}"
        )
    if D is not None and D.ndim != 1:
        raise Error(f"ssd: D: expected shape ({x.shape[2]},), got {tuple(D.shape)}")
    y = _Ssd.apply(x, dt, A.contiguous(), B, C, D, dt_bias, dt_softplus)
    return y if z is None else y * torch.nn.functional.silu(z)

"""The selective scan in Triton, forward and backward: the readable comparison to the kernels of
`flashkernel.selective_scan`.

A program takes BLOCK_D channels of one sequence with all their states and walks through time
BLOCK_T steps at a time. Inside such a tile the recurrence is an associative scan of pairs (a, b),
each standing for h -> a h + b; from tile to tile the state is carried in registers. The forward
keeps the state before each tile; the backward goes through the tiles from the last, computes the
states of a tile again, and scans the gradient of the state the other way round:

    dh_t = C_t dg_t + a_{t+1} dh_{t+1},   a_t = exp(dt_t A).

What is summed over channels or batches is stored by program and added up afterwards, in order.

Floor: one exponential per step, channel and state; the scan itself costs 2 log2(BLOCK_T)
multiply-adds on top of that, which a walk step by step would not."""

import torch
import triton
import triton.language as tl

from .. import Error
from ._device import INTERPRETED, takes

# Elements of a tile: BLOCK_T * BLOCK_D * BLOCK_N. The interpreter scans them one by one.
_BLOCK_T, _TILE = 32, 512 if INTERPRETED else 4096


@triton.jit
def _combine(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where exp(x) is too small to be added to 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + e
    small = tl.where(w == 1.0, e, tl.log(w) * (e / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _steps(base, t, d, length, channels, stride_t, stride_d):
    """A (steps, channels) tile in float32; 0 outside."""
    inside = (t[:, None] >= 0) & (t[:, None] < length) & (d[None, :] < channels)
    at = base + t[:, None].to(tl.int64) * stride_t + d[None, :] * stride_d
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _time_steps(
    delta, bias, t, d, length, channels, stride_t, stride_d, SOFTPLUS: tl.constexpr
):  # fmt: skip
    """dt of a tile, and delta + bias. Outside of the sequence dt is 0: such steps do nothing."""
    raw = _steps(delta, t, d, length, channels, stride_t, stride_d) + bias[None, :]
    dt = _softplus(raw) if SOFTPLUS else raw
    inside = (t[:, None] < length) & (d[None, :] < channels)
    return tl.where(inside, dt, 0.0), raw


@triton.jit
def _parameter(base, d, channels, PRESENT: tl.constexpr):
    if PRESENT:
        return tl.load(base + d, mask=d < channels, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(d).to(tl.float32)


@triton.jit
def _forward(
    u, delta, A, B, C, D, z, bias, y, states,
    u_b, u_t, u_d, delta_b, delta_t, delta_d, z_b, z_t, z_d, y_b, y_t, y_d,
    B_b, B_t, B_n, C_b, C_t, C_n,
    length, channels, N, tiles,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    own = (d[:, None] < channels) & (n[None, :] < N)
    decay = tl.load(A + d[:, None] * N + n[None, :], mask=own, other=0.0)
    skip = _parameter(D, d, channels, HAS_D)
    shift = _parameter(bias, d, channels, HAS_BIAS)
    h = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    last = tl.arange(0, BLOCK_T)[:, None, None] == BLOCK_T - 1
    for tile in range(tiles):
        if KEEP:
            at = ((b * tiles + tile) * channels + d[:, None]) * N + n[None, :]
            tl.store(states + at, h, mask=own)
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        x = _steps(u + b * u_b, t, d, length, channels, u_t, u_d)
        dt, _ = _time_steps(
            delta + b * delta_b, shift, t, d, length, channels, delta_t, delta_d, SOFTPLUS
        )
        Bt = _steps(B + b * B_b, t, n, length, N, B_t, B_n)
        Ct = _steps(C + b * C_b, t, n, length, N, C_t, C_n)
        a = tl.exp(dt[:, :, None] * decay[None, :, :])
        inputs = (dt * x)[:, :, None] * Bt[:, None, :]
        products, sums = tl.associative_scan((a, inputs), 0, _combine)
        all_h = sums + products * h[None, :, :]
        out = tl.sum(all_h * Ct[:, None, :], 2) + skip[None, :] * x
        if HAS_Z:
            gate = _steps(z + b * z_b, t, d, length, channels, z_t, z_d)
            out = out * gate * _sigmoid(gate)
        inside = (t[:, None] < length) & (d[None, :] < channels)
        at = y + b * y_b + t[:, None].to(tl.int64) * y_t + d[None, :] * y_d
        tl.store(at, out.to(y.dtype.element_ty), mask=inside)
        h = tl.sum(tl.where(last, all_h, 0.0), 0)


@triton.jit
def _backward(
    dy, u, delta, A, B, C, D, z, bias, states, du, ddelta, dz, dA, dB, dC, dD, dbias,
    dy_b, dy_t, dy_d, u_b, u_t, u_d, delta_b, delta_t, delta_d, z_b, z_t, z_d,
    B_b, B_t, B_n, C_b, C_t, C_n,
    length, channels, N, tiles,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    batch = tl.num_programs(1)
    block = tl.program_id(0).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    own = (d[:, None] < channels) & (n[None, :] < N)
    decay = tl.load(A + d[:, None] * N + n[None, :], mask=own, other=0.0)
    skip = _parameter(D, d, channels, HAS_D)
    shift = _parameter(bias, d, channels, HAS_BIAS)
    step = tl.arange(0, BLOCK_T)
    carry = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)  # of the state after the tile
    sum_A = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    sum_D = tl.zeros((BLOCK_D,), tl.float32)
    sum_bias = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(tiles):
        tile = tiles - 1 - k
        t = tile * BLOCK_T + step
        inside = (t[:, None] < length) & (d[None, :] < channels)
        x = _steps(u + b * u_b, t, d, length, channels, u_t, u_d)
        dt, raw = _time_steps(
            delta + b * delta_b, shift, t, d, length, channels, delta_t, delta_d, SOFTPLUS
        )
        next_dt, _ = _time_steps(
            delta + b * delta_b, shift, t + 1, d, length, channels, delta_t, delta_d, SOFTPLUS
        )
        Bt = _steps(B + b * B_b, t, n, length, N, B_t, B_n)
        Ct = _steps(C + b * C_b, t, n, length, N, C_t, C_n)
        at = ((b * tiles + tile) * channels + d[:, None]) * N + n[None, :]
        h = tl.load(states + at, mask=own, other=0.0)
        a = tl.exp(dt[:, :, None] * decay[None, :, :])
        inputs = (dt * x)[:, :, None] * Bt[:, None, :]
        products, sums = tl.associative_scan((a, inputs), 0, _combine)
        all_h = sums + products * h[None, :, :]

        dout = _steps(dy + b * dy_b, t, d, length, channels, dy_t, dy_d)
        place = (b * length + t[:, None]) * channels + d[None, :]
        if HAS_Z:
            gate = _steps(z + b * z_b, t, d, length, channels, z_t, z_d)
            s = _sigmoid(gate)
            out = tl.sum(all_h * Ct[:, None, :], 2) + skip[None, :] * x
            dgate = dout * out * s * (1.0 + gate * (1.0 - s))
            tl.store(dz + place, dgate.to(dz.dtype.element_ty), mask=inside)
            dout = dout * gate * s
        # The tile's last step takes what comes from behind as it is.
        following = tl.exp(next_dt[:, :, None] * decay[None, :, :])
        following = tl.where(step[:, None, None] == BLOCK_T - 1, 1.0, following)
        from_outputs = dout[:, :, None] * Ct[:, None, :]
        products, sums = tl.associative_scan((following, from_outputs), 0, _combine, reverse=True)
        dh = sums + products * carry[None, :, :]
        carry = tl.sum(tl.where(step[:, None, None] == 0, a * dh, 0.0), 0)

        through = dh * (all_h - inputs)  # dh a h_{t-1}: the gradient of dt A
        along = tl.sum(dh * Bt[:, None, :], 2)
        ddt = tl.sum(through * decay[None, :, :], 2) + x * along
        if SOFTPLUS:
            ddt = ddt * _sigmoid(raw)
        ddt = tl.where(inside, ddt, 0.0)
        dx = dt * along + skip[None, :] * dout
        tl.store(du + place, dx.to(du.dtype.element_ty), mask=inside)
        tl.store(ddelta + place, ddt.to(ddelta.dtype.element_ty), mask=inside)
        sum_A += tl.sum(through * dt[:, :, None], 0)
        sum_D += tl.sum(dout * x, 0)
        sum_bias += tl.sum(ddt, 0)
        shared = ((block * batch + b) * length + t[:, None]) * N + n[None, :]
        known = (t[:, None] < length) & (n[None, :] < N)
        tl.store(dB + shared, tl.sum(dh * (dt * x)[:, :, None], 1), mask=known)
        tl.store(dC + shared, tl.sum(all_h * dout[:, :, None], 1), mask=known)
    tl.store(dA + (b * channels + d[:, None]) * N + n[None, :], sum_A, mask=own)
    tl.store(dD + b * channels + d, sum_D, mask=d < channels)
    tl.store(dbias + b * channels + d, sum_bias, mask=d < channels)


def _blocks(N: int) -> tuple[int, int]:
    """(BLOCK_D, BLOCK_N)."""
    states = max(triton.next_power_of_2(N), 1)
    return max(_TILE // (_BLOCK_T * states), 1), states


def _strides(*tensors):
    return [s for t in tensors for s in ((0, 0, 0) if t is None else t.stride())]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, bias, softplus):
        b, length, channels = u.shape
        N = A.shape[1]
        block_d, block_n = _blocks(N)
        tiles = triton.cdiv(length, _BLOCK_T)
        keep = any(ctx.needs_input_grad)
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        states = u.new_empty((b, tiles, channels, N) if keep else 1, dtype=torch.float32)
        if y.numel() > 0:
            _forward[(triton.cdiv(channels, block_d), b)](
                u, delta, A, B, C, D, z, bias, y, states,
                *_strides(u, delta, z, y, B, C), length, channels, N, tiles,
                HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=bias is not None,
                SOFTPLUS=softplus, KEEP=keep,
                BLOCK_T=_BLOCK_T, BLOCK_D=block_d, BLOCK_N=block_n,
            )  # fmt: skip
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, states)
        ctx.softplus = softplus
        return y

    @staticmethod
    def backward(ctx, dy):
        u, delta, A, B, C, D, z, bias, states = ctx.saved_tensors
        b, length, channels = u.shape
        N = A.shape[1]
        block_d, block_n = _blocks(N)
        blocks, tiles = triton.cdiv(channels, block_d), triton.cdiv(length, _BLOCK_T)
        du, ddelta = (torch.empty(u.shape, device=u.device, dtype=u.dtype) for _ in range(2))
        dz = None if z is None else torch.empty_like(du)
        dA = A.new_zeros(b, channels, N)
        dB, dC = (A.new_zeros(blocks, b, length, N) for _ in range(2))
        dD, dbias = (A.new_zeros(b, channels) for _ in range(2))
        if du.numel() > 0:
            _backward[(blocks, b)](
                dy, u, delta, A, B, C, D, z, bias, states, du, ddelta, dz, dA, dB, dC, dD, dbias,
                *_strides(dy, u, delta, z, B, C), length, channels, N, tiles,
                HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=bias is not None,
                SOFTPLUS=ctx.softplus, BLOCK_T=_BLOCK_T, BLOCK_D=block_d, BLOCK_N=block_n,
            )  # fmt: skip
        return (
            du,
            ddelta,
            dA.sum(0),
            dB.sum(0).to(B.dtype),
            dC.sum(0).to(C.dtype),
            None if D is None else dD.sum(0).to(D.dtype),
            dz,
            None if bias is None else dbias.sum(0).to(bias.dtype),
            None,
        )


def selective_scan(u, delta, A, B, C, D=None, *, z=None, delta_bias=None, delta_softplus=False):
    """As flashkernel.selective_scan, for B and C (B, L, N) and without states given or returned."""
    named = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z}
    named["delta_bias"] = delta_bias
    for name, t in named.items():
        if t is not None and not takes(t.device):
            raise Error(
                f"triton.selective_scan: {name}: expected a tensor on a GPU, got {t.device}"
            )
    (b, length, channels), states = u.shape, A.shape[-1]
    shapes = {"delta": u.shape, "z": u.shape, "A": (channels, states), "D": (channels,)}
    shapes |= {"B": (b, length, states), "C": (b, length, states), "delta_bias": (channels,)}
    for name, shape in shapes.items():
        t = named[name]
        if t is not None and t.shape != shape:
            raise Error(
                f"triton.selective_scan: {name}: expected shape {tuple(shape)}, "
                f"got {tuple(t.shape)}"
            )
    for name in ("delta", "B", "C", "z"):
        t = named[name]
        if t is not None and t.dtype != u.dtype:
            raise Error(f"triton.selective_scan: {name}: expected {u.dtype}, got {t.dtype}")
    A, D, delta_bias = (None if t is None else t.contiguous() for t in (A.float(), D, delta_bias))
    return _Scan.apply(u, delta, A, B, C, D, z, delta_bias, delta_softplus)

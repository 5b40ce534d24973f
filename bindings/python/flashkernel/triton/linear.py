"""A linear layer with its activation in Triton, forward and backward: y = act(x W^T + b).

A program computes a tile of the product, BLOCK_M by BLOCK_N, with sums in float32, and has bias
and activation in its epilogue. Tiles that run at the same time share rows and columns in the
second-level cache: GROUP rows of tiles are walked column by column. The backward makes the gradient
of what the activation was given, then multiplies it twice with the same kernel; its sum over rows
is the bias's.

Floor: 2 M N K operations forward, 4 M N K backward."""

import torch
import triton
import triton.language as tl

from .. import Error
from ._device import dot_add, takes, tuned

_ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")

_TILES = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 32, 4, 4),
        (64, 64, 32, 4, 4),
        (32, 64, 32, 4, 2),
    )
]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif ACTIVATION == "gelu_tanh":
        x = x * _sigmoid((x + 0.044715 * x * x * x) * (2.0 * _ROOT_2_OVER_PI))
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    return x


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of _activate."""
    if ACTIVATION == "gelu":
        density = tl.exp(-0.5 * x * x) * (0.5 * _ROOT_2_OVER_PI)
        slope = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF)) + x * density
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, 1e4)  # for larger ones the slope is 0 or 1 already
        s = _sigmoid(x * (1.0 + 0.044715 * square) * (2.0 * _ROOT_2_OVER_PI))
        inner = (1.0 + 3.0 * 0.044715 * square) * (2.0 * _ROOT_2_OVER_PI)
        slope = s + x * s * (1.0 - s) * inner
    elif ACTIVATION == "silu":
        s = _sigmoid(x)
        slope = s * (1.0 + x * (1.0 - s))
    else:  # relu
        slope = tl.where(x > 0.0, 1.0, 0.0)
    return slope


@tuned(_TILES, key=["M", "N", "K"])
@triton.jit
def _product(
    a, b, bias, before, out, M, N, K, a_m, a_k, b_k, b_n, out_m,
    HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr = 8,
):  # fmt: skip
    """out = act(a b + bias); what the activation is given goes to `before`, which lies as out."""
    index, rows, columns = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = index // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    within = index % (GROUP * columns)
    m = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_at = a + m[:, None].to(tl.int64) * a_m + k[None, :].to(tl.int64) * a_k
    b_at = b + k[:, None].to(tl.int64) * b_k + n[None, :].to(tl.int64) * b_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        left = tl.load(a_at, mask=(m < M)[:, None] & (first + k < K)[None, :], other=0.0)
        right = tl.load(b_at, mask=(first + k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = dot_add(left, right.to(left.dtype), total)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * out_m + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if KEEP:
        tl.store(before + place, total.to(before.dtype.element_ty), mask=inside)
    total = _activate(total, ACTIVATION)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _inner(dy, before, inner, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of what the activation was given."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(dy + at, mask=at < count, other=0.0).to(tl.float32)
    x = tl.load(before + at, mask=at < count, other=0.0).to(tl.float32)
    g = g * _slope(x, ACTIVATION)
    tl.store(inner + at, g.to(inner.dtype.element_ty), mask=at < count)


def _multiply(a, b, out, bias=None, before=None, activation=None):
    """a (M, K) and b (K, N) of any strides, out (M, N) with contiguous rows."""
    (m, k), n = a.shape, b.shape[1]
    if m and n:
        _product[lambda c: (triton.cdiv(m, c["BLOCK_M"]) * triton.cdiv(n, c["BLOCK_N"]),)](
            a, b, bias, before, out, m, n, k, *a.stride(), *b.stride(), out.stride(0),
            HAS_BIAS=bias is not None, KEEP=before is not None, ACTIVATION=activation,
        )  # fmt: skip
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation):
        y = x.new_empty(x.shape[0], weight.shape[0])
        keep = activation is not None and any(ctx.needs_input_grad)
        before = torch.empty_like(y) if keep else None
        _multiply(x, weight.t(), y, bias, before, activation)
        ctx.save_for_backward(x, weight, bias, before)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, before = ctx.saved_tensors
        inner = dy.contiguous()
        if ctx.activation is not None and dy.numel():
            dy, inner = inner, torch.empty_like(before)
            _inner[(triton.cdiv(dy.numel(), 1024),)](
                dy, before, inner, dy.numel(), ACTIVATION=ctx.activation, BLOCK=1024
            )
        dx = _multiply(inner, weight, torch.empty_like(x, memory_format=torch.contiguous_format))
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        _multiply(inner.t(), x, dweight)
        dbias = None if bias is None else inner.sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, dweight, dbias, None


def linear(x, weight, bias=None, *, activation=None):
    """act(x weight^T + bias) of x (..., K), weight (N, K) and bias (N), on the GPU: as
    `flashkernel.linear`, and differentiable as it is, for the activations None, "gelu",
    "gelu_tanh", "silu" and "relu"."""

    def wrong(name, expected, got):
        raise Error(f"triton.linear: {name}: expected {expected}, got {got}")

    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None and name == "bias":
            continue
        if not isinstance(t, torch.Tensor) or not takes(t.device):
            wrong(name, "a torch tensor on a GPU", getattr(t, "device", type(t).__name__))
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        wrong("x", "float32, float16 or bfloat16", x.dtype)
    if weight.ndim != 2 or x.ndim == 0 or weight.shape[1] != x.shape[-1]:
        columns = x.shape[-1] if x.ndim else "K"
        wrong("weight", f"shape (N, {columns}) to fit x", tuple(weight.shape))
    if weight.dtype not in (x.dtype, torch.float32):
        wrong("weight", f"{x.dtype} or torch.float32", weight.dtype)
    if bias is not None and bias.shape != weight.shape[:1]:
        wrong("bias", f"shape {tuple(weight.shape[:1])} to fit weight", tuple(bias.shape))
    if activation not in _ACTIVATIONS:
        wrong("activation", f"one of {_ACTIVATIONS}", repr(activation))
    bias = None if bias is None else bias.contiguous()
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, activation)
    return y.reshape(*x.shape[:-1], weight.shape[0])

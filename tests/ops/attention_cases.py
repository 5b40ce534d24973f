"""Calls of attention for its tests: the formula in plain torch, and cases feature by feature."""

import itertools
import math

import numpy as np
import torch

from harness import Case, normal


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

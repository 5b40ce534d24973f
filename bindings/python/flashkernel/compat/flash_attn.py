"""The functions of flash-attn 2 over `flashkernel.attention`: their names, argument orders,
defaults, layouts and return values, on the CPU too.

    from flashkernel.compat.flash_attn import flash_attn_func  # was: from flash_attn import ...

There is no dropout, no page table (`block_table`) and no padding on the left (`cache_leftpad`):
asking for them raises `flashkernel.compat.NotSupported`. With
`return_attn_probs=True` the result is (out, softmax_lse, None), as theirs is without dropout;
softmax_lse is differentiable, and -inf for a query that sees no key."""

import operator

import torch

from .. import Error, attention, rope
from ._errors import NotSupported

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q (B, Lq, H, D), k and v (B, Lk, Hkv, D) -> out (B, Lq, H, D); lse (B, H, Lq)."""
    return _attend(
        "flash_attn_func",
        (q, k, v),
        dropout_p,
        return_attn_probs,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """As flash_attn_func, with kv (B, Lk, 2, Hkv, D)."""
    return flash_attn_func(
        q,
        *_unpack("flash_attn_kvpacked_func", "kv", kv, ndim=5, parts=2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """As flash_attn_func, with qkv (B, L, 3, H, D)."""
    return flash_attn_func(
        *_unpack("flash_attn_qkvpacked_func", "qkv", qkv, ndim=5, parts=3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Sequences one after another: q (Tq, H, D), k and v (Tk, Hkv, D), cu_seqlens int32 (S + 1) ->
    out (Tq, H, D); lse (H, Tq). The longest lengths are taken as said and not needed."""
    _refuse("flash_attn_varlen_func", block_table=block_table)
    return _attend(
        "flash_attn_varlen_func",
        (q, k, v),
        dropout_p,
        return_attn_probs,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        deterministic=deterministic,
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """As flash_attn_varlen_func, with kv (Tk, 2, Hkv, D)."""
    return flash_attn_varlen_func(
        q,
        *_unpack("flash_attn_varlen_kvpacked_func", "kv", kv, ndim=4, parts=2),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """As flash_attn_varlen_func, with qkv (T, 3, H, D)."""
    return flash_attn_varlen_func(
        *_unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, ndim=4, parts=3),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """q (B, Lq, H, D), caches (rows, Lmax, Hkv, D) -> out (B, Lq, H, D); lse (B, H, Lq). The caches
    hold cache_seqlens tokens, one number or int32 (B); k and v (B, Lnew, Hkv, D) are written behind
    them first. With rotary tables k is rotated by its places in the cache and q from the same place
    on, or, where nothing is masked, all of q by that place. cache_batch_idx (B): the caches' row of
    each sequence. Tensors of lengths and rows are read on the host, and sequences of different
    lengths are attended one after another; num_splits is taken as said and not needed."""
    name = "flash_attn_with_kvcache"
    _refuse(name, cache_leftpad=cache_leftpad, block_table=block_table)
    window = _window(name, window_size)
    batch, room, new = q.shape[0], k_cache.shape[1], 0 if k is None else k.shape[1]
    if k is None and rotary_cos is not None:
        raise Error(f"{name}: rotary_cos: expected None where there is no k, got a tensor")
    if k is not None and (v is None or cache_seqlens is None):
        missing = "v" if v is None else "cache_seqlens"
        raise Error(f"{name}: {missing}: expected a value where there is k, got None")
    for argument, x, cache in (("k", k, k_cache), ("v", v, v_cache)) if k is not None else ():
        wanted, got = ((batch, new, *cache.shape[2:]), cache.dtype), (tuple(x.shape), x.dtype)
        if got != wanted:
            raise Error(f"{name}: {argument}: expected {wanted} to fit its cache, got {got}")
    lengths = room if cache_seqlens is None else cache_seqlens
    lengths = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
    lengths = lengths if isinstance(lengths, list) else [lengths] * batch
    if len(lengths) != batch or any(not 0 <= n <= room - new for n in lengths):
        wanted = f"{batch} lengths from 0 to {room - new}"
        raise Error(f"{name}: cache_seqlens: expected {wanted}, got {lengths}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wanted, got = tuple(k_cache.shape[:3]), tuple(v_cache.shape[:3])
        raise Error(f"{name}: v_cache: expected {wanted}, as k_cache has, then D, got {got}")
    rows = range(batch)
    if cache_batch_idx is not None:
        rows = cache_batch_idx.tolist()
        if cache_batch_idx.shape != (batch,) or any(not 0 <= row < len(k_cache) for row in rows):
            wanted = f"{batch} rows from 0 to {len(k_cache) - 1}"
            raise Error(f"{name}: cache_batch_idx: expected {wanted}, got {rows}")
    elif len(k_cache) != batch:
        wanted = f"{batch} rows, as many as q has, where there is no cache_batch_idx"
        raise Error(f"{name}: k_cache: expected {wanted}, got {len(k_cache)}")
    if rotary_cos is not None:
        first = torch.tensor(lengths, dtype=torch.int32, device=q.device)[:, None]
        after = torch.arange(max(q.shape[1], new), dtype=torch.int32, device=q.device)
        masked = causal or window != (-1, -1)
        tables = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
        q = rope(q, positions=first + after[: q.shape[1]] * masked, **tables)
        k = rope(k, positions=first + after[:new], **tables)
    if batch == 0 or cache_batch_idx is None and len(set(lengths)) == 1:  # all at once
        parts = [(slice(batch), slice(batch), max(lengths, default=0))]
    else:
        both = enumerate(zip(rows, lengths, strict=True))
        parts = [(slice(b, b + 1), slice(row, row + 1), n) for b, (row, n) in both]
    results = []
    for own, row, length in parts:
        if k is not None:
            k_cache[row, length : length + new] = k[own]
            v_cache[row, length : length + new] = v[own]
        by_sequence = alibi_slopes is not None and alibi_slopes.ndim == 2
        result = attention(
            q[own],
            k_cache[row, : length + new],
            v_cache[row, : length + new],
            causal=causal,
            window=window,
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes[own] if by_sequence else alibi_slopes,
            return_lse=True,
        )
        results.append(result)
    out, lse = (torch.cat(t) for t in zip(*results, strict=True))
    return (out, lse) if return_softmax_lse else out


Unsupported = NotSupported  # its name here in earlier versions


def _refuse(function: str, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotSupported(f"{function}: {name}: expected None (not supported here)")


def _window(function: str, size) -> tuple[int, int]:
    """The two numbers of a window, which may be entries of a tensor or of an array. Any number
    below 0 is no limit."""
    try:
        left, right = (max(operator.index(n), -1) for n in size)
    except (TypeError, ValueError):
        raise Error(f"{function}: window_size: expected two integers, got {size!r}") from None
    return left, right


def _attend(function: str, tensors: tuple, dropout_p, return_attn_probs, *, window, **options):
    if dropout_p != 0:
        raise NotSupported(
            f"{function}: dropout_p: expected 0 (there is no dropout here), got {dropout_p}"
        )
    window = _window(function, window)
    result = attention(*tensors, return_lse=return_attn_probs, window=window, **options)
    return (*result, None) if return_attn_probs else result


def _unpack(function: str, name: str, packed, ndim: int, parts: int):
    """The tensors that stand side by side in the third dim from the end."""
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise Error(
            f"{function}: {name}: expected {ndim} dimensions, the third from the end of size "
            f"{parts}, got shape {tuple(packed.shape)}"
        )
    return packed.unbind(-3)

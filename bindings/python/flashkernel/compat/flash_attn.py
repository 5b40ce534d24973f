"""The functions of flash-attn 2 over `flashkernel.attention`: their names, argument orders,
defaults, layouts and return values, on the CPU too.

    from flashkernel.compat.flash_attn import flash_attn_func  # was: from flash_attn import ...

There is no dropout and no page table (`block_table`): asking for them is an error. With
`return_attn_probs=True` the result is (out, softmax_lse, None), as theirs is without dropout;
softmax_lse is differentiable, and -inf for a query that sees no key."""

from .. import Error, attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
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
    if block_table is not None:
        raise Error(
            "flash_attn_varlen_func: block_table: expected None, got a page table, which is not "
            "supported here"
        )
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


def _attend(function: str, tensors: tuple, dropout_p, return_attn_probs, **options):
    if dropout_p != 0:
        raise Error(
            f"{function}: dropout_p: expected 0 (there is no dropout here), got {dropout_p}"
        )
    result = attention(*tensors, return_lse=return_attn_probs, **options)
    return (*result, None) if return_attn_probs else result


def _unpack(function: str, name: str, packed, ndim: int, parts: int):
    """The tensors that stand side by side in the third dim from the end."""
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise Error(
            f"{function}: {name}: expected {ndim} dimensions, the third from the end of size "
            f"{parts}, got shape {tuple(packed.shape)}"
        )
    return packed.unbind(-3)

"""mamba-ssm's state-space duality over `flashkernel.ssd`: its names, argument orders and layouts,
on the CPU too.

    from flashkernel.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

Tensors may come in different dtypes, as there: the arithmetic is in the widest of them, the result
in the dtype of x. `seq_idx` is looked at on the host: a call with it waits for the GPU.
`flashkernel.ssd` with `cu_seqlens` does not."""

import torch as _torch

from ..... import Error as _Error
from ..... import ssd as _ssd
from .... import causal_conv1d as _conv
from ...._errors import NotSupported as _NotSupported
from ..._dtypes import of_one_dtype as _of_one_dtype
from .layernorm_gated import rmsnorm_fn as _rmsnorm

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]

_NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=_NO_LIMIT,
    return_final_states=False,
    return_varlen_states=False,
):
    """x, z (B, L, H, P), dt (B, L, H), A (H), B, C (B, L, G, N), D (H) or (H, P), states
    (B, H, P, N) -> out (B, L, H, P)[, final states][, varlen states]. seq_idx (B, L): steps of one
    number, side by side, are a sequence of their own. return_varlen_states: the states at the ends
    of the sequences that cu_seqlens (S + 1) packs in a batch of 1, (S, H, P, N). chunk_size is
    theirs: chunks here are as long as suits the kernel."""
    name = "mamba_chunk_scan_combined"
    if return_varlen_states and cu_seqlens is None:
        raise _Error(f"{name}: cu_seqlens: expected a tensor for return_varlen_states, got None")
    if A.is_complex():
        raise _NotSupported(f"{name}: A: expected real numbers, got complex ones")
    dtype = x.dtype
    x, dt, B, C, z = _of_one_dtype(x, dt, B, C, z)
    starts = None
    if cu_seqlens is not None and seq_idx is None:
        starts = cu_seqlens.int()
    elif seq_idx is not None:
        starts = _starts(seq_idx, cu_seqlens if return_varlen_states else None)
    batch, length = x.shape[:2]
    state = initial_states
    if starts is not None:
        x, dt, B, C, z = (None if t is None else t.flatten(0, 1)[None] for t in (x, dt, B, C, z))
        state = _by_sequence(state, starts, length)
    result = _ssd(
        x,
        dt,
        A.float(),
        B,
        C,
        None if D is None else D.float(),
        z=z,
        dt_bias=None if dt_bias is None else dt_bias.float(),
        dt_softplus=dt_softplus,
        dt_limit=tuple(float(limit) for limit in dt_limit),
        initial_state=None if state is None else state.to(_state_dtype(state, x)),
        return_final_state=return_final_states or return_varlen_states,
        cu_seqlens=starts,
    )
    if not (return_final_states or return_varlen_states):
        return result.reshape(batch, length, *result.shape[2:]).to(dtype)
    out, states = result
    results = [out.reshape(batch, length, *out.shape[2:]).to(dtype)]
    if return_final_states:
        # Of packed sequences: each row's last one's.
        ends = None if starts is None else _torch.arange(1, batch + 1, device=x.device) * length
        results.append(states if ends is None else states[_sequence_at(starts, ends - 1)])
    if return_varlen_states:
        ends = None if seq_idx is None else cu_seqlens[1:].long() - 1
        results.append(states if ends is None else states[_sequence_at(starts, ends)])
    return tuple(results)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=_NO_LIMIT,
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    """A Mamba-2 block behind its first projection, whose result zxbcdt (B, L, 2 dim + 2 G N + H, or
    more, for an MLP beside it) is -> (B, L, dim), or what the last projection makes of that[, final
    states]. D is (H) with headdim, or (H, P)."""
    name = "mamba_split_conv1d_scan_combined"
    if D.ndim == 1 and headdim is None:
        raise _Error(f"{name}: headdim: expected a number for D of 1 dimension, got None")
    heads, channels = D.shape if D.ndim == 2 else (D.shape[0], headdim)
    dim = heads * channels
    states = (conv1d_weight.shape[0] - dim) // ngroups // 2
    outer = (zxbcdt.shape[-1] - 2 * dim - 2 * ngroups * states - heads) // 2
    if outer < 0:
        raise _Error(
            f"{name}: zxbcdt: expected at least {zxbcdt.shape[-1] - 2 * outer} features, got "
            f"{zxbcdt.shape[-1]}"
        )
    mlp, z, xBC, dt = zxbcdt.split([2 * outer, dim, conv1d_weight.shape[0], heads], -1)
    # The convolution begins anew at each sequence, the states of those before it being no part.
    xBC = _conv.causal_conv1d_fn(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = xBC.split([dim, ngroups * states, ngroups * states], -1)
    normed = rmsnorm_weight is not None
    result = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, channels)),
        dt,
        A,
        B.unflatten(-1, (ngroups, states)),
        C.unflatten(-1, (ngroups, states)),
        chunk_size,
        D=D,
        z=None if normed else z.unflatten(-1, (heads, channels)),
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )
    out, final = result if return_final_states else (result, None)
    out = out.flatten(-2)
    if normed:
        out = _rmsnorm(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if outer > 0:
        gate, up = mlp.chunk(2, -1)
        out = _torch.cat([_torch.nn.functional.silu(gate) * up, out], -1)
    if outproj_weight is not None:
        out = (
            out.to(outproj_weight.dtype) if not _torch.is_autocast_enabled(out.device.type) else out
        )
        out = _torch.nn.functional.linear(out, outproj_weight, outproj_bias)
    return (out, final) if return_final_states else out


def _state_dtype(state, x):
    return state.dtype if state.dtype in (x.dtype, _torch.float32) else _torch.float32


def _starts(seq_idx, cu_seqlens):
    """Where sequences begin in all rows one after another, and where the last one ends: where
    seq_idx changes, and, if there are cu_seqlens, there too."""
    begins = _torch.ones_like(seq_idx, dtype=_torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    begins = begins.flatten()
    if cu_seqlens is not None:
        inside = cu_seqlens[cu_seqlens < begins.numel()].long()
        begins = begins.index_fill(0, inside, True)
    starts = begins.nonzero()[:, 0].int()
    return _torch.nn.functional.pad(starts, (0, 1), value=begins.numel())


def _by_sequence(states, starts, length):
    """A state for each sequence: a row's own where the row begins, else 0."""
    if states is None or states.shape[0] == starts.numel() - 1:
        return states
    begins = starts[:-1].long()
    own = (begins % length == 0).to(states.dtype)
    return states[begins // length] * own[:, None, None, None]


def _sequence_at(starts, steps):
    """The number of the sequence that has a step."""
    return _torch.searchsorted(starts.long(), steps.contiguous(), right=True) - 1

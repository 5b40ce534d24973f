"""The functions of causal-conv1d over `flashkernel.causal_conv1d`: their names, argument orders and
layouts (time last), on the CPU too.

    from flashkernel.compat.causal_conv1d import causal_conv1d_fn  # was: from causal_conv1d import

`seq_idx` and negative entries of `conv_state_indices` are looked at on the host: a call with either
waits for the GPU. `flashkernel.causal_conv1d` with `cu_seqlens` does not."""

import torch as _torch

from .. import Error as _Error
from .. import causal_conv1d as _conv
from .. import causal_conv1d_update as _update
from ._errors import NotSupported as _NotSupported

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """x (B, D, L), weight (D, W), states (B, D, W-1) -> out (B, D, L)[, final states]. seq_idx
    (B, L): steps of one number, side by side, are a sequence of their own; where it is negative,
    out is 0."""
    name = "causal_conv1d_fn"
    weight, bias = _parameters(x, weight, bias)
    activation = _activation(name, activation)
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise _NotSupported(
                f"{name}: seq_idx: expected None where there are states, got a tensor"
            )
        return _packed(x, weight, bias, seq_idx, activation)
    result = _conv(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        initial_state=None if initial_states is None else initial_states.transpose(1, 2),
        return_final_state=return_final_states,
    )
    if not return_final_states:
        return result.transpose(1, 2)
    out, state = (t.transpose(1, 2) for t in result)
    if final_states_out is not None:
        state = final_states_out.copy_(state)
    return out, state


@_torch.no_grad()
def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
):
    """x (B, D) or (B, D, L), conv_state (B, D, at least W-1), which moves on in place -> out of x's
    shape. cache_seqlens (B): the state is a ring, whose next place that is, modulo its size.
    conv_state_indices (B): each row's state is that row of conv_state; below 0, none is, and out
    is 0."""
    name = "causal_conv1d_update"
    weight, bias = _parameters(x, weight, bias)
    activation = _activation(name, activation)
    history, kept = weight.shape[1] - 1, conv_state.shape[-1]
    if kept < history:
        raise _Error(f"{name}: conv_state: expected at least {history} inputs, got {kept}")
    steps = x if x.ndim == 3 else x[..., None]
    rows = Rows(conv_state, conv_state_indices)
    step = _step if cache_seqlens is None else _ring_step
    out = rows.masked(step(steps, rows.state, weight, bias, activation, cache_seqlens))
    rows.put_back()
    return out if x.ndim == 3 else out[..., 0]


@_torch.no_grad()
def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """x (all steps, D), sequences one after another, cu_seqlens (B + 1) -> the last state_len steps
    of each, (B, D, state_len), zeros before the first."""
    ends = cu_seqlens[1:, None].long()
    at = ends - state_len + _torch.arange(state_len, device=x.device)
    exists = at >= cu_seqlens[:-1, None]
    states = x[at.clamp(min=0)] * exists[..., None].to(x.dtype)
    return states.transpose(1, 2)


class Rows:
    """The rows of a cache of states that a call is about, all of them or those `indices` names, in
    place or, with indices, as a copy that goes back."""

    def __init__(self, cache, indices):
        self.cache, self.state, self.kept = cache, cache, None
        if indices is None:
            return
        self.indices = indices.long()
        self.kept = self.indices >= 0
        self.state = cache[self.indices.clamp(min=0)]

    def masked(self, out):
        """0 in rows without a state."""
        if self.kept is None:
            return out
        return out.masked_fill(~self.kept.reshape(-1, *[1] * (out.ndim - 1)), 0)

    def put_back(self):
        if self.kept is not None:
            self.cache[self.indices[self.kept]] = self.state[self.kept]


def _step(steps, conv_state, weight, bias, activation, _):
    history, kept = weight.shape[1] - 1, conv_state.shape[-1]
    older = None
    if kept > history:  # columns that no tap reaches, but that move all the same
        older = _torch.cat([conv_state, steps.to(conv_state.dtype)], -1)[..., -kept:-history]
    recent = conv_state[..., kept - history :].transpose(1, 2)
    state = recent if recent.dtype == steps.dtype else recent.to(steps.dtype)
    out = _update(steps.transpose(1, 2), state, weight, bias, activation=activation)
    if state is not recent:
        recent.copy_(state)
    if older is not None:
        conv_state[..., : kept - history].copy_(older)
    return out.transpose(1, 2)


def _ring_step(steps, conv_state, weight, bias, activation, cache_seqlens):
    history, kept = weight.shape[1] - 1, conv_state.shape[-1]
    (b, d, length), device = steps.shape, steps.device

    def places(begin, end):
        at = cache_seqlens.long()[:, None] + _torch.arange(begin, end, device=device)
        return (at % kept)[:, None].expand(b, d, -1)

    state = conv_state.gather(2, places(-history, 0)).transpose(1, 2).to(steps.dtype)
    out = _update(steps.transpose(1, 2), state, weight, bias, activation=activation)
    # Of more steps than there are places, the last ones stay.
    first = max(0, length - kept)
    last = steps[..., first:].to(conv_state.dtype)
    conv_state.scatter_(2, places(first, length), last)
    return out.transpose(1, 2)


def _packed(x, weight, bias, seq_idx, activation):
    b, d, length = x.shape
    begins = _torch.ones_like(seq_idx, dtype=_torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    offsets = begins.flatten().nonzero()[:, 0].int()
    offsets = _torch.nn.functional.pad(offsets, (0, 1), value=b * length)
    rows = x.transpose(1, 2).reshape(1, b * length, d)
    out = _conv(rows, weight, bias, activation=activation, cu_seqlens=offsets)
    return out.reshape(b, length, d).transpose(1, 2).masked_fill((seq_idx < 0)[:, None], 0)


def _parameters(x, weight, bias):
    """In a dtype the op takes: x's, or float32."""
    weight = weight if weight.dtype == x.dtype else weight.float()
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.float()
    return weight, bias


def _activation(name, activation):
    if activation not in (None, "silu", "swish"):
        raise _NotSupported(
            f"{name}: activation: expected None, 'silu' or 'swish', got {activation!r}"
        )
    return activation and "silu"

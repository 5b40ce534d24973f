"""The functions of causal-conv1d over `flashkernel.causal_conv1d`: their names, argument orders and
layouts (time last), on the CPU too.

    from flashkernel.compat.causal_conv1d import causal_conv1d_fn  # was: from causal_conv1d import

Sequences told apart by `seq_idx`, circular states (`cache_seqlens`) and `conv_state_indices` are an
error; packed sequences go to `flashkernel.causal_conv1d` with `cu_seqlens`."""

import torch as _torch

from .. import Error as _Error
from .. import causal_conv1d as _conv
from .. import causal_conv1d_update as _update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


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
    """x (B, D, L), weight (D, W), states (B, D, W-1) -> out (B, D, L)[, final states]."""
    _refuse("causal_conv1d_fn", seq_idx=seq_idx)
    weight, bias = _parameters(x, weight, bias)
    result = _conv(
        x.transpose(1, 2),
        weight,
        bias,
        activation=_activation("causal_conv1d_fn", activation),
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
    shape."""
    name = "causal_conv1d_update"
    _refuse(name, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    weight, bias = _parameters(x, weight, bias)
    history, kept = weight.shape[1] - 1, conv_state.shape[-1]
    if kept < history:
        raise _Error(f"{name}: conv_state: expected at least {history} inputs, got {kept}")
    steps = x if x.ndim == 3 else x[..., None]
    older = None
    if kept > history:  # columns that no tap reaches, but that move all the same
        older = _torch.cat([conv_state, steps.to(conv_state.dtype)], -1)[..., -kept:-history]
    recent = conv_state[..., kept - history :].transpose(1, 2)
    state = recent if recent.dtype == x.dtype else recent.to(x.dtype)
    out = _update(
        steps.transpose(1, 2), state, weight, bias, activation=_activation(name, activation)
    ).transpose(1, 2)
    if state is not recent:
        recent.copy_(state)
    if older is not None:
        conv_state[..., : kept - history].copy_(older)
    return out if x.ndim == 3 else out[..., 0]


def _parameters(x, weight, bias):
    """In a dtype the op takes: x's, or float32."""
    weight = weight if weight.dtype == x.dtype else weight.float()
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.float()
    return weight, bias


def _activation(name, activation):
    if activation not in (None, "silu", "swish"):
        raise _Error(f"{name}: activation: expected None, 'silu' or 'swish', got {activation!r}")
    return activation and "silu"


def _refuse(function, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise _Error(
                f"{function}: {name}: expected None, got a value; there is no kernel for it"
            )

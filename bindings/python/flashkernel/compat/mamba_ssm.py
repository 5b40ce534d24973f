"""The functions of mamba-ssm over FlashKernel's ops: their names, argument orders and layouts (time
last), on the CPU too.

    from flashkernel.compat.mamba_ssm import selective_scan_fn  # was: from mamba_ssm.ops...

`install()` stands these modules, and `flashkernel.compat.causal_conv1d`, in the place of packages
that are not installed: libraries that look for them (Transformers' Mamba) then take them."""

import sys as _sys
import types as _types

import torch as _torch

from .. import Error as _Error
from .. import selective_scan as _scan
from .. import selective_state_update as _update
from ..torch import Mamba
from . import causal_conv1d as _causal_conv1d

__all__ = ["Mamba", "install", "mamba_inner_fn", "selective_scan_fn", "selective_state_update"]


def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    """u, delta, z (B, D, L); A (D, N); B, C (B, N, L), (B, G, N, L) or, the same at every step,
    (D, N); D, delta_bias (D) -> out (B, D, L)[, last state (B, D, N)]."""
    result = _scan(
        u.transpose(1, 2),
        delta.to(u.dtype).transpose(1, 2),
        _real(A),
        _by_step(B, u),
        _by_step(C, u),
        None if D is None else D.float(),
        z=None if z is None else z.to(u.dtype).transpose(1, 2),
        delta_bias=None if delta_bias is None else delta_bias.float(),
        delta_softplus=delta_softplus,
        return_last_state=return_last_state,
    )
    if not return_last_state:
        return result.transpose(1, 2)
    return result[0].transpose(1, 2), result[1]


@_torch.no_grad()
def selective_state_update(
    state,
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    state_batch_indices=None,
):
    """state (B, D, N) or (B, H, P, N), which moves on in place; x, dt, z (B, D) or (B, H, P) -> out
    as x. state_batch_indices (B): each row's state is that row of `state`, which may have others;
    below 0, none is, and out is 0."""
    rows = _causal_conv1d.Rows(state, state_batch_indices)
    state = rows.state
    own = state if state.dtype in (x.dtype, _torch.float32) else state.float()
    out = _update(
        own,
        x,
        dt.to(x.dtype),
        _real(A),
        B.to(x.dtype),
        C.to(x.dtype),
        None if D is None else D.float(),
        z=None if z is None else z.to(x.dtype),
        dt_bias=None if dt_bias is None else dt_bias.float(),
        dt_softplus=dt_softplus,
    )
    if own is not state:
        state.copy_(own)
    out = rows.masked(out)
    rows.put_back()
    return out


def mamba_inner_fn(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    """A Mamba block between its two outer projections' weights: xz (B, 2 D, L) -> (B, L, out).
    `checkpoint_lvl` is theirs; what is kept here is what autograd keeps."""
    linear = _torch.nn.functional.linear
    x, z = xz.chunk(2, 1)
    weight = conv1d_weight.squeeze(1) if conv1d_weight.ndim == 3 else conv1d_weight
    x = _causal_conv1d.causal_conv1d_fn(x, weight, conv1d_bias, activation="silu")
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    projected = linear(x.transpose(1, 2), x_proj_weight)
    dt, rest = projected[..., :rank], projected[..., rank:]
    dt = linear(_normed(dt, dt_rms_weight, b_c_dt_rms_eps), delta_proj_weight).transpose(1, 2)
    if B is None:
        B, rest = rest[..., :states], rest[..., states:]
        B = B if B_proj_bias is None else B + B_proj_bias.to(B.dtype)
        B = _normed(B, b_rms_weight, b_c_dt_rms_eps).transpose(1, 2)
    if C is None:
        C = rest[..., -states:]
        C = C if C_proj_bias is None else C + C_proj_bias.to(C.dtype)
        C = _normed(C, c_rms_weight, b_c_dt_rms_eps).transpose(1, 2)
    y = selective_scan_fn(x, dt, A, B, C, D, z, delta_bias, delta_softplus)
    bias = None if out_proj_bias is None else out_proj_bias.to(out_proj_weight.dtype)
    return linear(y.transpose(1, 2), out_proj_weight, bias)


def install():
    """Registers these functions as the modules `mamba_ssm` and `causal_conv1d`, where those are not
    installed. To be called before the library that looks for them is imported."""
    here = _sys.modules[__name__]
    paths = {
        "mamba_ssm": here,
        "mamba_ssm.ops": here,
        "mamba_ssm.ops.selective_scan_interface": here,
        "mamba_ssm.ops.triton": here,
        "mamba_ssm.ops.triton.selective_state_update": here,
        "causal_conv1d": _causal_conv1d,
        "causal_conv1d.causal_conv1d_varlen": _causal_conv1d,
    }
    import importlib.util

    for name, functions in paths.items():
        package = name.partition(".")[0]
        known = _sys.modules.get(package)
        if known is None and importlib.util.find_spec(package) is not None:
            raise _Error(f"install: {package} is installed; import it or this module, not both")
        module = _types.ModuleType(name, functions.__doc__)
        module.__dict__.update({f: getattr(functions, f) for f in functions.__all__})
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
        _sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(_sys.modules[parent], last):
            setattr(_sys.modules[parent], last, module)


def _real(A):
    if A.is_complex():
        raise _Error("selective_scan_fn: A: expected real numbers, got complex ones")
    return A.float()


def _by_step(t, u):
    """B or C as (B, L, N) or (B, L, G, N)."""
    t = t.to(u.dtype)
    if t.ndim == 2:  # each channel's own, at every step
        return t.expand(u.shape[0], u.shape[2], *t.shape)
    return t.transpose(1, 2) if t.ndim == 3 else t.permute(0, 3, 1, 2)


def _normed(x, weight, eps):
    if weight is None:
        return x
    return _torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

"""The functions of mamba-ssm over FlashKernel's ops: their names, argument orders and layouts (time
last), on the CPU too.

    from flashkernel.compat.mamba_ssm import selective_scan_fn  # was: from mamba_ssm.ops...

`install()` stands these modules, and `flashkernel.compat.causal_conv1d`, in the place of packages
that are not installed: libraries that look for them (Transformers' Mamba) then take them. Tensors
may come in different dtypes, as there: the arithmetic is in the widest of them, the result in the
dtype of u or x. Complex A raises `flashkernel.compat.NotSupported`."""

import importlib.metadata as _metadata
import sys as _sys
import types as _types

import torch as _torch

from ... import Error as _Error
from ... import selective_scan as _scan
from ... import selective_state_update as _update
from .. import causal_conv1d as _causal_conv1d
from .._errors import NotSupported as _NotSupported
from ._blocks import InferenceParams, Mamba, Mamba2
from ._dtypes import of_one_dtype as _of_one_dtype
from .ops.triton.layernorm_gated import rmsnorm_fn
from .ops.triton.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

__all__ = [
    "InferenceParams",
    "Mamba",
    "Mamba2",
    "install",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
]


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
    dtype = u.dtype
    u, delta, B, C, z = _of_one_dtype(u, delta, B, C, z)
    result = _scan(
        u.transpose(1, 2),
        delta.transpose(1, 2),
        _real(A),
        *_by_step(B, C, u),
        None if D is None else D.float(),
        z=None if z is None else z.transpose(1, 2),
        delta_bias=None if delta_bias is None else delta_bias.float(),
        delta_softplus=delta_softplus,
        return_last_state=return_last_state,
    )
    if not return_last_state:
        return result.transpose(1, 2).to(dtype)
    return result[0].transpose(1, 2).to(dtype), result[1]


def selective_scan_ref(
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
    """As selective_scan_fn, by the recurrence in torch's own operations, in float32."""
    dtype, u, dt = u.dtype, u.float(), delta.float()
    dt = dt if delta_bias is None else dt + delta_bias.float()[:, None]
    dt = _torch.nn.functional.softplus(dt) if delta_softplus else dt
    B, C = _by_step(B, C, u, groups=u.shape[1])
    state, outputs = u.new_zeros(u.shape[0], *A.shape), [u[..., :0]]
    for t in range(u.shape[2]):
        step = dt[..., t, None]
        state = _torch.exp(step * _real(A)) * state + step * B[:, t] * u[..., t, None]
        outputs.append((state * C[:, t]).sum(-1, keepdim=True))
    y = _torch.cat(outputs, -1)
    y = y if D is None else y + D.float()[:, None] * u
    y = (y if z is None else y * _torch.nn.functional.silu(z.float())).to(dtype)
    return (y, state) if return_last_state else y


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
    state, dtype = rows.state, x.dtype
    x, dt, B, C, z = _of_one_dtype(x, dt, B, C, z)
    own = state if state.dtype in (x.dtype, _torch.float32) else state.float()
    out = _update(
        own,
        x,
        dt,
        _real(A),
        B,
        C,
        None if D is None else D.float(),
        z=z,
        dt_bias=None if dt_bias is None else dt_bias.float(),
        dt_softplus=dt_softplus,
    )
    if own is not state:
        state.copy_(own)
    out = rows.masked(out.to(dtype))
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
    installed. To be called before the library that looks for them is imported. Where Transformers
    is installed it must be one that takes modules from elsewhere: version 5 or later."""
    _check_transformers()
    here = _sys.modules[__name__]
    paths = {
        "mamba_ssm": here,
        "mamba_ssm.ops": here,
        "mamba_ssm.ops.selective_scan_interface": here,
        "mamba_ssm.ops.triton": here,
        "mamba_ssm.ops.triton.selective_state_update": here,
        "mamba_ssm.ops.triton.ssd_combined": here,
        "mamba_ssm.ops.triton.layernorm_gated": here,
        "mamba_ssm.modules": here,
        "mamba_ssm.modules.mamba_simple": here,
        "mamba_ssm.modules.mamba2": here,
        "mamba_ssm.utils": here,
        "mamba_ssm.utils.generation": here,
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


def _check_transformers() -> None:
    """Raises an error where Transformers would go on without these modules, and not say so."""
    try:
        version = _metadata.version("transformers")
    except _metadata.PackageNotFoundError:
        return
    if int(version.partition(".")[0]) < 5:
        raise _NotSupported(
            "install: expected Transformers 5 or later (an earlier one takes mamba_ssm and "
            f"causal_conv1d only as installed packages), got {version}"
        )
    if _torch.cuda.is_available():
        return
    import transformers.integrations

    if not hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"):
        raise _NotSupported(
            "install: expected a later version of Transformers, such as 5.23 (this one takes "
            f"mamba_ssm and causal_conv1d on a GPU only, and there is none), got {version}"
        )


def _real(A):
    if A.is_complex():
        raise _NotSupported("selective_scan_fn: A: expected real numbers, got complex ones")
    return A.float()


def _by_step(B, C, u, groups=1):
    """B and C as (B, L, G, N), of as many groups as the one that has more of them."""

    def grouped(t):
        t = t.to(u.dtype)  # which may be wider
        if t.ndim == 2:  # each channel's own, at every step
            return t.expand(u.shape[0], u.shape[2], *t.shape)
        return t.transpose(1, 2).unsqueeze(2) if t.ndim == 3 else t.permute(0, 3, 1, 2)

    both = grouped(B), grouped(C)
    groups = max(groups, *(t.shape[2] for t in both))
    return [
        t if t.shape[2] == groups else t.repeat_interleave(groups // t.shape[2], 2) for t in both
    ]


def _normed(x, weight, eps):
    if weight is None:
        return x
    weight = weight[: x.shape[-1]]  # Transformers' FalconMamba has more than theirs reads
    return _torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

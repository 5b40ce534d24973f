"""mamba-ssm's gated norm over `flashkernel.rms_norm`: its name, argument order and defaults."""

from ..... import rms_norm as _rms_norm
from ...._errors import NotSupported as _NotSupported

__all__ = ["rmsnorm_fn"]


def rmsnorm_fn(
    x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True, upcast=True
):
    """norm(x) silu(z), or norm(x silu(z)) without norm_before_gate, over the last axis or groups of
    it. The arithmetic is in float32, as with their `upcast`."""
    if bias is not None:
        raise _NotSupported("rmsnorm_fn: bias: expected None (not supported here), got a tensor")
    weight = weight if weight.dtype == x.dtype else weight.float()
    gate = None if z is None else z.to(x.dtype)
    return _rms_norm(
        x, weight, gate=gate, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
    )

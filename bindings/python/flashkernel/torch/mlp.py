"""The feed-forward half of a transformer's layer as a torch module, in three calls: norm, linear
with activation or gate, linear with residual."""

from torch import nn

import flashkernel as fk

from ._linear import Linear

__all__ = ["MLP"]


class MLP(nn.Module):
    """x (..., dim) -> x + down(act(up(norm(x)))), or with `gated`, and n = norm(x),
    x + down(act(gate(n)) * up(n)).

    hidden: the inner width; None: 4 dim, or with `gated` 8/3 dim, rounded up to a multiple of 64.
    activation: as in `flashkernel.linear`; None: "gelu_tanh", or with `gated` "silu". norm: "rms",
    "layer" or None. bias: of the linear layers; with `gated` there is none. residual: whether x is
    added. recompute: with `gated`, the backward computes gate and up again rather than the forward
    keeping them. The state_dict has norm, gate, up and down, as torch's own modules name theirs."""

    def __init__(
        self,
        dim,
        hidden=None,
        *,
        activation=None,
        gated=False,
        norm="rms",
        bias=False,
        residual=True,
        eps=1e-5,
        recompute=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if norm not in ("rms", "layer", None):
            raise fk.Error(f"MLP: norm: expected 'rms', 'layer' or None, got {norm!r}")
        if gated and bias:
            raise fk.Error("MLP: bias: expected False with gated (it has none), got True")
        if hidden is None:
            hidden = -(-8 * dim // (3 * 64)) * 64 if gated else 4 * dim
        made = {"device": device, "dtype": dtype}
        norms = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, None: None}
        self.norm = norms[norm] and norms[norm](dim, eps=eps, **made)
        self.gate = Linear(dim, hidden, bias=False, **made) if gated else None
        self.up = Linear(dim, hidden, bias=bias, **made)
        self.down = Linear(hidden, dim, bias=bias, **made)
        self.activation = activation or ("silu" if gated else "gelu_tanh")
        self.residual, self.recompute = residual, recompute

    def forward(self, x):
        h = x
        if isinstance(self.norm, nn.RMSNorm):
            h = fk.rms_norm(x, self.norm.weight, eps=self.norm.eps)
        elif self.norm is not None:
            h = fk.layer_norm(x, self.norm.weight, self.norm.bias, eps=self.norm.eps)
        return self.down(self.inner(h), residual=x if self.residual else None)

    def inner(self, h):
        """What `down` takes: act(up(h)), or with the gate act(gate(h)) * up(h)."""
        if self.gate is None:
            return self.up(h, self.activation)
        return self.up.gated(h, self.gate, self.activation, self.recompute)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, residual={self.residual}"

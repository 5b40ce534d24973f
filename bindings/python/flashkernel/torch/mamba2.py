"""Mamba-2 as a torch module: a block whose state_dict is that of mamba-ssm's `Mamba2`."""

import math

import torch
from torch import nn

import flashkernel as fk

from ._linear import Linear

__all__ = ["Mamba2"]


class _GatedNorm(nn.Module):
    """rms_norm with a gate, in groups of columns."""

    def __init__(self, columns, group_size, norm_before_gate, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns, device=device, dtype=dtype))
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate

    def forward(self, x, gate):
        return fk.rms_norm(
            x, self.weight, gate=gate, eps=self.eps, group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )  # fmt: skip


class Mamba2(nn.Module):
    """x (B, L, d_model) -> (B, L, d_model). For token after token, `step` takes and updates what
    `allocate_state` gives."""

    def __init__(
        self,
        d_model,
        d_state=128,
        d_conv=4,
        conv_init=None,
        expand=2,
        headdim=64,
        d_ssm=None,
        ngroups=1,
        A_init_range=(1, 16),
        D_has_hdim=False,
        rmsnorm=True,
        norm_before_gate=False,
        dt_min=0.001,
        dt_max=0.1,
        dt_init_floor=1e-4,
        dt_limit=(0.0, float("inf")),
        bias=False,
        conv_bias=True,
        chunk_size=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.headdim = d_model, d_state, d_conv, headdim
        self.d_inner = int(expand * d_model)
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.ngroups, self.D_has_hdim, self.rmsnorm = ngroups, D_has_hdim, rmsnorm
        if self.d_ssm % headdim != 0:
            raise fk.Error(
                f"Mamba2: headdim: expected a divisor of d_ssm {self.d_ssm}, got {headdim}"
            )
        self.nheads = self.d_ssm // headdim
        self.dt_limit, self.chunk_size = tuple(dt_limit), chunk_size
        shared = 2 * ngroups * d_state
        self.conv_dim = self.d_ssm + shared
        self.in_proj = Linear(d_model, 2 * self.d_inner + shared + self.nheads, bias=bias, **made)
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, d_conv, groups=self.conv_dim, bias=conv_bias, **made
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        # softplus(dt_bias) is log-uniform between dt_min and dt_max.
        uniform = torch.rand(self.nheads, device=device)
        dt = torch.exp(uniform * math.log(dt_max / dt_min) + math.log(dt_min))
        dt = dt.clamp(min=dt_init_floor)
        self.dt_bias = nn.Parameter((dt + torch.log(-torch.expm1(-dt))).to(dtype))
        A = torch.empty(self.nheads, device=device).uniform_(*A_init_range)
        self.A_log = nn.Parameter(A.log().to(dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, **made))
        if rmsnorm:
            self.norm = _GatedNorm(self.d_ssm, self.d_ssm // ngroups, norm_before_gate, **made)
        self.out_proj = Linear(self.d_inner, d_model, bias=bias, **made)

    def forward(self, x, cu_seqlens=None):
        """cu_seqlens: sequences packed one after another along L, in a batch of 1."""
        outer, z, xBC, dt = self._projected(x)
        xBC = fk.causal_conv1d(
            xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu",
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self._finish(outer, z, self._scan(xBC, z, dt, cu_seqlens=cu_seqlens))

    def allocate_state(self, batch_size, device=None, dtype=None) -> tuple:
        """(convolution's, scan's), both zero: before a sequence's first token."""
        weight = self.conv1d.weight
        device = weight.device if device is None else device
        dtype = weight.dtype if dtype is None else dtype
        conv = torch.zeros(batch_size, self.d_conv - 1, self.conv_dim, device=device, dtype=dtype)
        heads = (self.nheads, self.headdim, self.d_state)
        return conv, torch.zeros(batch_size, *heads, device=device)

    @torch.no_grad()
    def step(self, x, state):
        """x (B, d_model), or of several tokens (B, L, d_model), -> the same; the state moves on in
        place."""
        conv, scan = state
        outer, z, xBC, dt = self._projected(x)
        recent = conv.to(xBC.dtype)  # of which the caller's state may not be
        xBC = fk.causal_conv1d_update(
            xBC, recent, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        )
        if recent is not conv:
            conv.copy_(recent)
        if x.ndim == 3:
            y, last = self._scan(xBC, z, dt, initial_state=scan, return_final_state=True)
            scan.copy_(last)
            return self._finish(outer, z, y)
        heads = (self.nheads, self.headdim)
        x, B, C = self._heads(xBC)
        bias, limited = self.dt_bias, self.dt_limit != (0.0, math.inf)
        if limited:  # which the op does not know
            dt = nn.functional.softplus(dt.float() + bias.float()).clamp(*self.dt_limit).to(x.dtype)
        y = fk.selective_state_update(
            scan,
            x,
            dt[..., None].expand(-1, *heads),
            self._decay()[:, None, None].expand(*heads, self.d_state),
            B,
            C,
            self._skip().reshape(self.nheads, -1).expand(heads),
            z=None if self.rmsnorm else z.unflatten(-1, heads),
            dt_bias=None if limited else bias[:, None].expand(heads),
            dt_softplus=not limited,
        )
        return self._finish(outer, z, y.flatten(-2))

    def _projected(self, x):
        """What goes around the scan (None: nothing does), z, what the convolution takes, dt."""
        rest = self.d_inner - self.d_ssm
        sizes = [2 * rest, self.d_ssm, self.conv_dim, self.nheads]
        outer, z, xBC, dt = self.in_proj(x).split(sizes, -1)
        return outer if rest else None, z, xBC, dt

    def _heads(self, xBC):
        shared = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, shared, shared], -1)
        groups = (self.ngroups, self.d_state)
        return (
            x.unflatten(-1, (self.nheads, self.headdim)),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
        )

    def _scan(self, xBC, z, dt, **options):
        x, B, C = self._heads(xBC)
        result = fk.ssd(
            x, dt, self._decay(), B, C, self._skip(), dt_bias=self.dt_bias, dt_softplus=True,
            z=None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
            dt_limit=self.dt_limit, chunk_size=self.chunk_size, **options,
        )  # fmt: skip
        if options.get("return_final_state"):
            return result[0].flatten(-2), result[1]
        return result.flatten(-2)

    def _finish(self, outer, z, y):
        if self.rmsnorm:
            y = self.norm(y, z)
        if outer is not None:
            gate, up = outer.chunk(2, -1)
            y = torch.cat([nn.functional.silu(gate) * up, y], -1)
        return self.out_proj(y)

    def _decay(self):
        return -torch.exp(self.A_log.float())

    def _skip(self):
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D

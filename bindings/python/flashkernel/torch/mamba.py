"""Mamba as torch modules: a block whose state_dict is that of mamba-ssm's `Mamba`, and a stack of
them."""

import math

import torch
from torch import nn

import flashkernel as fk

from ._linear import Linear, parameter

__all__ = ["Mamba", "MambaStack"]


class Mamba(nn.Module):
    """x (B, L, d_model) -> (B, L, d_model). For token after token, `step` takes and updates what
    `allocate_state` gives."""

    #: What `flashkernel.torch.quantize` leaves alone: this layer's bias is the scan's.
    kept_in_float = ("dt_proj",)

    def __init__(
        self,
        d_model,
        d_state=16,
        d_conv=4,
        expand=2,
        dt_rank="auto",
        dt_min=0.001,
        dt_max=0.1,
        dt_scale=1.0,
        dt_init_floor=1e-4,
        conv_bias=True,
        bias=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv = d_model, d_state, d_conv
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.in_proj = Linear(d_model, 2 * self.d_inner, bias=bias, **made)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, bias=conv_bias, **made
        )
        self.x_proj = Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **made)
        self.dt_proj = Linear(self.dt_rank, self.d_inner, **made)
        self.out_proj = Linear(self.d_inner, d_model, bias=bias, **made)
        steps = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(steps.log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        self._initialise_steps(dt_min, dt_max, dt_scale, dt_init_floor)

    @torch.no_grad()
    def _initialise_steps(self, dt_min, dt_max, dt_scale, floor) -> None:
        """softplus(bias) is log-uniform between dt_min and dt_max."""
        spread = self.dt_rank**-0.5 * dt_scale
        nn.init.uniform_(self.dt_proj.weight, -spread, spread)
        uniform = torch.rand(self.d_inner, device=self.dt_proj.bias.device)
        dt = torch.exp(uniform * math.log(dt_max / dt_min) + math.log(dt_min)).clamp(min=floor)
        self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, x):
        return self.out_proj(self.mix(x))

    def mix(self, x, last=False):
        """What `out_proj` takes: of every token (B, L, d_inner), or with `last` of the last one
        alone, (B, d_inner). Its gate is then the only one that is computed."""
        if last:
            z = self.in_proj.rows(x[:, -1], self.d_inner, 2 * self.d_inner)
            x = self.in_proj.rows(x, 0, self.d_inner)
        else:
            x, z = self.in_proj(x).chunk(2, -1)
        x = fk.causal_conv1d(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        if last:
            return self._scan(x, None)[:, -1] * nn.functional.silu(z)
        return self._scan(x, z)

    def allocate_state(self, batch_size, device=None, dtype=None) -> tuple:
        """(convolution's, scan's), both zero: before a sequence's first token."""
        weight = self.conv1d.weight
        device = weight.device if device is None else device
        dtype = weight.dtype if dtype is None else dtype
        conv = torch.zeros(batch_size, self.d_conv - 1, self.d_inner, device=device, dtype=dtype)
        scan = torch.zeros(batch_size, self.d_inner, self.d_state, device=device)
        return conv, scan

    @torch.no_grad()
    def step(self, x, state):
        """x (B, d_model), or of several tokens (B, L, d_model), -> the same; the state moves on in
        place."""
        return self.out_proj(self.mix_step(x, state))

    def mix_step(self, x, state):
        """What `out_proj` takes in a step."""
        conv, scan = state
        conv1d, dt_proj = self.conv1d, self.dt_proj
        x, z = self.in_proj(x).chunk(2, -1)
        same = conv.dtype == x.dtype  # which the caller's state need not be
        recent = conv if same else conv.to(x.dtype)
        weight, bias = parameter(conv1d, "weight").squeeze(1), parameter(conv1d, "bias")
        x = fk.causal_conv1d_update(x, recent, weight, bias, activation="silu")
        if not same:
            conv.copy_(recent)
        if x.ndim == 3:
            y, last = self._scan(x, z, initial_state=scan, return_last_state=True)
            scan.copy_(last)
            return y
        dt, B, C = self._selected(x, dt_proj)
        return fk.selective_state_update(
            scan, x, dt, self._decay(), B, C, parameter(self, "D"), z=z,
            dt_bias=parameter(dt_proj, "bias"), dt_softplus=True,
        )  # fmt: skip

    def _scan(self, x, z, **states):
        dt, B, C = self._selected(x, self.dt_proj)
        return fk.selective_scan(
            x, dt, self._decay(), B, C, self.D, z=z, delta_bias=self.dt_proj.bias,
            delta_softplus=True, **states,
        )  # fmt: skip

    def _decay(self):
        return -torch.exp(parameter(self, "A_log").float())

    def _selected(self, x, dt_proj):
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        return fk.linear(dt, parameter(dt_proj, "weight")), B, C


class _Layer(nn.Module):
    def __init__(self, d_model, eps, made, options):
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps, **made)
        self.mixer = Mamba(d_model, **options, **made)

    def forward(self, x, residual):
        """What the layer adds to the sum of the two, and that sum."""
        x, residual = _add_norm(x, residual, self.norm)
        return self.mixer(x), residual

    def step(self, x, residual, state):
        x, residual = _add_norm(x, residual, self.norm)
        return self.mixer.step(x, state), residual


def _add_norm(x, residual, norm):
    """The norm of a sum, and the sum; a residual of None is 0."""
    if residual is None:
        return fk.rms_norm(x, norm.weight, eps=norm.eps), x
    return fk.rms_norm(x, norm.weight, residual=residual, eps=norm.eps)


class MambaStack(nn.Module):
    """Residual layers of norm and Mamba, and a last norm: x (B, L, d_model) -> (B, L, d_model). The
    state_dict has the names of mamba-ssm's MixerModel, without its embedding. `options` go to each
    `Mamba`."""

    def __init__(self, d_model, layers, *, eps=1e-5, device=None, dtype=None, **options):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(_Layer(d_model, eps, made, options) for _ in range(layers))
        self.norm_f = nn.RMSNorm(d_model, eps, **made)

    def forward(self, x):
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return _add_norm(x, residual, self.norm_f)[0]

    def allocate_state(self, batch_size, device=None, dtype=None) -> list:
        return [layer.mixer.allocate_state(batch_size, device, dtype) for layer in self.layers]

    @torch.no_grad()
    def step(self, x, state):
        """Does a step of each layer, as `Mamba.step` does of one."""
        residual = None
        for layer, own in zip(self.layers, state, strict=True):
            x, residual = layer.step(x, residual, own)
        return _add_norm(x, residual, self.norm_f)[0]

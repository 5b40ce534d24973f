"""mamba-ssm's modules over `flashkernel.torch`'s: their arguments, their states, and the cache that
generation carries along."""

import dataclasses

import torch

from ... import Error
from ...torch import Mamba as _Mamba
from ...torch import Mamba2 as _Mamba2
from .._errors import NotSupported


@dataclasses.dataclass
class InferenceParams:
    """What generation carries along: the states of each layer by its `layer_idx`, and how many
    tokens they have seen."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = dataclasses.field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen, max_batch_size):
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


InferenceParams.__module__ = "flashkernel.compat.mamba_ssm"  # where users find it


class _Cached:
    """What both blocks have on top of FlashKernel's: states as mamba-ssm lays them out, of which
    the convolution's has d_conv inputs, and InferenceParams."""

    def _continued(self, hidden_states, inference_params):
        if self.layer_idx is None:
            name = type(self).__name__
            raise Error(f"{name}: layer_idx: expected a number for inference_params, got None")
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(hidden_states.shape[0], 0)
        own = states[self.layer_idx]
        if inference_params.seqlen_offset == 0:
            for state in own:
                state.zero_()
        return self.step(hidden_states, *own)[0]

    def step(self, hidden_states, conv_state, ssm_state):
        """(B, L, d_model) -> the same, and the states, which move on in place."""
        # Of the d_conv inputs that theirs keeps, the oldest is never read.
        state = conv_state[..., 1:].transpose(1, 2), ssm_state
        one = hidden_states.shape[1] == 1
        out = super().step(hidden_states[:, 0] if one else hidden_states, state)
        return out[:, None] if one else out, conv_state, ssm_state

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """(conv_state, ssm_state), both zero; they have the same size for any max_seqlen."""
        weight = self.conv1d.weight
        made = {"device": weight.device, "dtype": weight.dtype if dtype is None else dtype}
        return tuple(torch.zeros(batch_size, *size, **made) for size in self._state_sizes())


class Mamba(_Cached, _Mamba):
    """`flashkernel.torch.Mamba` with mamba-ssm's arguments and states: the convolution's
    (B, d_inner, d_conv), the scan's (B, d_inner, d_state). `use_fast_path` is theirs: there is one
    path here."""

    def __init__(
        self,
        d_model,
        d_state=16,
        d_conv=4,
        expand=2,
        dt_rank="auto",
        dt_min=0.001,
        dt_max=0.1,
        dt_init="random",
        dt_scale=1.0,
        dt_init_floor=1e-4,
        conv_bias=True,
        bias=False,
        use_fast_path=True,
        layer_idx=None,
        device=None,
        dtype=None,
    ):
        if dt_init not in ("random", "constant"):
            raise NotSupported(f"Mamba: dt_init: expected 'random' or 'constant', got {dt_init!r}")
        super().__init__(
            d_model, d_state, d_conv, expand, dt_rank, dt_min, dt_max, dt_scale, dt_init_floor,
            conv_bias, bias, device, dtype,
        )  # fmt: skip
        if dt_init == "constant":
            torch.nn.init.constant_(self.dt_proj.weight, self.dt_rank**-0.5 * dt_scale)
        self.expand, self.use_fast_path, self.layer_idx = expand, use_fast_path, layer_idx
        # Marks that training code for mamba-ssm looks for.
        self.A_log._no_weight_decay = self.D._no_weight_decay = True
        self.dt_proj.bias._no_reinit = True

    def forward(self, hidden_states, inference_params=None):
        """(B, L, d_model) -> the same. With inference_params, whose states move on, it is a prompt
        where their seqlen_offset is 0, else what follows."""
        if inference_params is None:
            return super().forward(hidden_states)
        return self._continued(hidden_states, inference_params)

    def _state_sizes(self):
        return (self.d_inner, self.d_conv), (self.d_inner, self.d_state)


Mamba.__module__ = "flashkernel.compat.mamba_ssm"


class Mamba2(_Cached, _Mamba2):
    """`flashkernel.torch.Mamba2` with mamba-ssm's arguments and states: the convolution's
    (B, d_ssm + 2 G N, d_conv), the scan's (B, H, P, N). `use_mem_eff_path` and `sequence_parallel`
    are theirs: there is one path here, on one device."""

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
        chunk_size=256,
        use_mem_eff_path=True,
        layer_idx=None,
        process_group=None,
        sequence_parallel=True,
        device=None,
        dtype=None,
    ):
        if process_group is not None:
            raise NotSupported("Mamba2: process_group: expected None (not supported here)")
        super().__init__(
            d_model, d_state, d_conv, conv_init, expand, headdim, d_ssm, ngroups, A_init_range,
            D_has_hdim, rmsnorm, norm_before_gate, dt_min, dt_max, dt_init_floor, dt_limit, bias,
            conv_bias, None, device, dtype,
        )  # fmt: skip
        self.expand, self.layer_idx, self.use_mem_eff_path = expand, layer_idx, use_mem_eff_path
        for parameter in (self.A_log, self.D, self.dt_bias):
            parameter._no_weight_decay = True

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        """(B, L, d_model) -> the same. With inference_params, whose states move on, it is a prompt
        where their seqlen_offset is 0, else what follows."""
        for name, value in (("seqlen", seqlen), ("seq_idx", seq_idx)):
            if value is not None:
                raise NotSupported(f"Mamba2: {name}: expected None (not supported here)")
        if inference_params is None:
            return super().forward(u, None if cu_seqlens is None else cu_seqlens.int())
        return self._continued(u, inference_params)

    def _state_sizes(self):
        heads = (self.nheads, self.headdim, self.d_state)
        return (self.conv_dim, self.d_conv), heads


Mamba2.__module__ = "flashkernel.compat.mamba_ssm"

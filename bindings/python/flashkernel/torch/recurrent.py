"""LSTM and GRU as torch modules: the arguments, the state_dict and the results of torch.nn.LSTM and
torch.nn.GRU, and a `step` for one frame at a time. Each layer and direction is one call of
`fk.lstm` or `fk.gru`."""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import flashkernel as fk

__all__ = ["GRU", "LSTM"]


class _Recurrent(nn.Module):
    """`gates` rows of weights for each hidden unit; `states` tensors are carried along."""

    gates: int
    states: int

    def __init__(
        self,
        input_size,
        hidden_size,
        num_layers=1,
        bias=True,
        batch_first=False,
        dropout=0.0,
        bidirectional=False,
        proj_size=0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        _check(min(input_size, hidden_size, num_layers) > 0, "expected sizes from 1")
        _check(0 <= dropout <= 1, f"dropout: expected 0 to 1, got {dropout}")
        _check(
            0 <= proj_size < hidden_size,
            f"proj_size: expected less than hidden_size, {hidden_size}, got {proj_size}",
        )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        rows, outputs = self.gates * hidden_size, proj_size or hidden_size
        self._names = []  # of a layer's parameters, layer by layer and direction by direction
        for i in range(num_layers):
            inputs = input_size if i == 0 else outputs * self.num_directions
            for end in [f"_l{i}", f"_l{i}_reverse"][: self.num_directions]:
                shapes = {"weight_ih": (rows, inputs), "weight_hh": (rows, outputs)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                if proj_size:
                    shapes["weight_hr"] = (proj_size, hidden_size)
                for name, shape in shapes.items():
                    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(name + end, parameter)
                self._names.append({name: name + end for name in shapes})
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def all_weights(self) -> list:
        return [[getattr(self, name) for name in names.values()] for names in self._names]

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            bound = 1 / math.sqrt(self.hidden_size)
            nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Does nothing: weights are read where they are. It is here for code that calls torch's."""

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {"proj_size": 0, "num_layers": 1, "bias": True, "batch_first": False,
                    "dropout": 0.0, "bidirectional": False}  # fmt: skip
        given = {k: getattr(self, k) for k in defaults}
        return text + "".join(f", {k}={v}" for k, v in given.items() if v != defaults[k])

    def layer(self, x, layer=0, states=None, **options):
        """One layer in one direction of x (B, L, I), from its states (B, H), or zeros: (y, (h,)) or
        (y, (h, c)). States that come out are float32. With a `norm_weight` among the options, the
        norm of y stands before y."""
        raise NotImplementedError

    def _weights(self, layer) -> dict:
        short = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh",
                 "weight_hr": "w_hr"}  # fmt: skip
        return {short[k]: getattr(self, name) for k, name in self._names[layer].items()}

    def _layers(self, x, states, cu_seqlens):
        """x (B, L, I) through all layers; `states` (layers * directions, S, ...) each, or None."""
        last = []
        for i in range(self.num_layers):
            outputs = []
            for direction in range(self.num_directions):
                layer = i * self.num_directions + direction
                before = None if states is None else tuple(s[layer] for s in states)
                y, after = self.layer(
                    x, layer, before, cu_seqlens=cu_seqlens, reverse=direction == 1
                )
                outputs.append(y)
                last.append(after)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout > 0 and self.training and i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def _as_states(self, hx):
        return None if hx is None else (hx,) if self.states == 1 else tuple(hx)

    def _as_given(self, states, dtype):
        states = tuple(s.to(dtype) for s in states)
        return states[0] if self.states == 1 else states

    def forward(self, input, hx=None):
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, self._as_states(hx))
        _check(
            input.ndim in (2, 3) and input.shape[-1] == self.input_size,
            f"input: expected (..., {self.input_size}) of 2 or 3 dims, got {tuple(input.shape)}",
        )
        batched = input.ndim == 3
        states = self._as_states(hx)
        if not batched:
            input = input.unsqueeze(0)
            states = None if states is None else tuple(s.unsqueeze(1) for s in states)
        elif not self.batch_first:
            input = input.transpose(0, 1)
        self._check_states(states, input.shape[0])
        y, states = self._layers(input, states, None)
        if not batched:
            y, states = y.squeeze(0), tuple(s.squeeze(1) for s in states)
        elif not self.batch_first:
            y = y.transpose(0, 1).contiguous()
        return y, self._as_given(states, y.dtype)

    def _forward_packed(self, input, states):
        """torch packs time by time, the longest sequence first; the ops one sequence after another,
        in any order."""
        data, sizes, sorted_indices, unsorted_indices = input
        _check(
            data.ndim == 2 and data.shape[1] == self.input_size,
            f"input: expected (..., {self.input_size}) of 2 dims, got {tuple(data.shape)}",
        )
        self._check_states(states, int(sizes[0]))
        if states is not None and sorted_indices is not None:
            states = tuple(s.index_select(1, sorted_indices) for s in states)
        rows = torch.arange(int(sizes[0]))[:, None]
        taken = rows < sizes  # (sequence, time)
        order = (sizes.cumsum(0) - sizes + rows)[taken].to(data.device)
        ends = nn.functional.pad(taken.sum(1).cumsum(0), (1, 0))
        y, states = self._layers(data[order][None], states, ends.int().to(data.device))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        y = y[0][back]
        if unsorted_indices is not None:
            states = tuple(s.index_select(1, unsorted_indices) for s in states)
        packed = PackedSequence(y, sizes, sorted_indices, unsorted_indices)
        return packed, self._as_given(states, y.dtype)

    def _check_states(self, states, batch) -> None:
        if states is None:
            return
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        for name, state, size in zip(("h_0", "c_0"), states, sizes, strict=False):
            expected = (self.num_layers * self.num_directions, batch, size)
            _check(
                tuple(state.shape) == expected,
                f"{name}: expected shape {expected}, got {tuple(state.shape)}",
            )

    def step(self, x, state=None):
        """One frame: x (B, input_size) -> (y (B, output size), state). `state` is what `forward`
        takes and gives, with tensors (layers, B, ...); None is zeros. States that come out are
        float32."""
        _check(not self.bidirectional, "step: expected a module that is not bidirectional")
        _check(
            x.ndim == 2 and x.shape[1] == self.input_size,
            f"step: x: expected shape (B, {self.input_size}), got {tuple(x.shape)}",
        )
        states = self._as_states(state)
        self._check_states(states, x.shape[0])
        y, states = self._layers(x.unsqueeze(1), states, None)
        return y.squeeze(1), states[0] if self.states == 1 else states


class LSTM(_Recurrent):
    """torch.nn.LSTM on `fk.lstm`: forward(input, (h_0, c_0)) -> (output, (h_n, c_n))."""

    gates, states = 4, 2

    def layer(self, x, layer=0, states=None, **options):
        h0, c0 = (None, None) if states is None else states
        *y, h, c = fk.lstm(x, **self._weights(layer), h0=h0, c0=c0, **options)
        return *y, (h, c)


class GRU(_Recurrent):
    """torch.nn.GRU on `fk.gru`: forward(input, h_0) -> (output, h_n). With reset_after=False the
    reset gate comes before the product with the state, as in Keras and ONNX."""

    gates, states = 3, 1

    def __init__(self, *args, reset_after=True, **options):
        super().__init__(*args, **options)
        _check(self.proj_size == 0, "proj_size: expected none, a GRU has no projection")
        self.reset_after = reset_after

    def layer(self, x, layer=0, states=None, **options):
        h0 = None if states is None else states[0]
        *y, h = fk.gru(x, **self._weights(layer), h0=h0, reset_after=self.reset_after, **options)
        return *y, (h,)


def _check(holds, message) -> None:
    if not holds:
        raise fk.Error(message)

# Written by tools/generate_stubs.py.
"""FlashKernel: fused kernels for sequence models, on any CPU and on NVIDIA GPUs.

One function per op. Each takes NumPy arrays, torch tensors or JAX arrays and returns the same kind
on the same device. `help(flashkernel.rms_norm)` shows what an op computes and takes.
"""

import os as _os
import typing as _typing
from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex, overload

from jax import Array
from numpy.typing import NDArray
from torch import Tensor

from . import backbones as backbones
from . import bench as bench
from . import compat as compat
from . import jax as jax
from . import pull as pull
from . import torch as torch
from . import triton as triton
from ._engine import Model as Model
from ._error import Error as Error
from ._library import force_implementation as force_implementation
from ._library import num_threads as num_threads
from ._library import set_cpu_target as set_cpu_target
from ._library import set_num_threads as set_num_threads
from ._model import Tokenizer as Tokenizer
from ._packed import PackedLinear as PackedLinear

__version__: str

def build_info() -> dict[str, _typing.Any]:
    """Version, compiler, SIMD targets, CUDA architectures and the GPUs of this machine."""

def load(path_or_name: str | bytes | _os.PathLike[str] = '', *, tokenizer: str | bytes | _os.PathLike[str] | None = None, context: int = 0, cache: str | None = None, quantize: str | None = None) -> Model:
    """A model from a Hugging Face folder, a .safetensors, .gguf or llama2.c .bin file, or by name
    ("smollm2", after `fk pull smollm2`; nothing: the built-in one). Returns a model with
    `generate`, `logits`, `tokenizer` and `config`.

    tokenizer: a tokenizer file, where the model has none beside it. context: tokens to hold (0:
    the model's own). cache: keys and values as "f16" or "f32". quantize: what float weights become
    ("q8_0", "q4_0", ...).
    """

@overload
def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: NDArray[Any] | None = None, sinks: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, cu_seqlens_q: NDArray[Any] | None = None, cu_seqlens_k: NDArray[Any] | None = None, return_lse: Literal[False] = False, deterministic: bool = False, rotary: tuple[NDArray[Any], NDArray[Any]] | None = None, rotary_interleaved: bool = False, q_scale: NDArray[Any] | None = None, k_scale: NDArray[Any] | None = None, v_scale: NDArray[Any] | None = None) -> NDArray[Any]:
    """Attention of each query over the keys it sees: out = softmax(scale * q k^T + ...) v. Sequences
    stand in a batch (B, L, heads, D) or, with cu_seqlens, packed one after another (T, heads, D).
    Every H / G query heads share a key head. Causal and window are aligned to the bottom right:
    query i sits at key i + Lk - Lq.

    Arguments
      q: T[B, Lq, H, D | Tq, H, D]: queries
      k: T[B, Lk, G, D | Tk, G, D]: keys; H is a multiple of G
      v: T[B, Lk, G, E | Tk, G, E]: values
      causal: boolean: a query sees no key after itself
      window: the tuple (window_left, window_right)
      window_left: integer, at least -1: how many keys before itself a query sees; -1: all
      window_right: integer, at least -1: how many keys after itself a query sees; -1: all
      scale: number: of the scores; None: 1 / sqrt(D)
      softcap: number, at least 0: scores are squeezed into (-softcap, softcap) by a tanh; 0: they are not
      alibi_slopes: P[H | B, H], optional: -slope * distance is added to the scores
      sinks: P[H], optional: one more logit in the softmax of each head
      bias: P[B?, H?, Lq?, Lk? | H?, Lq?, Lk? | Lq?, Lk? | Lk?], optional: added to the scores
      cu_seqlens_q: J[S+1], optional: where each sequence begins among the Tq packed queries, and Tq
      cu_seqlens_k: J[S+1], optional: where each sequence begins among the Tk packed keys, and Tk
      return_lse: boolean: return lse too
      deterministic: boolean: the backward gives the same bits every time
      rotary: the tuple (rotary_cos, rotary_sin)
      rotary_cos: P[M, R], optional: cosines by position: q and k are rotated first, key j by position j, query i by i + Lk - Lq; 2R <= D
      rotary_sin: P[M, R], optional: sines by position
      rotary_interleaved: boolean: rotated pairs are neighbours, not halves
      q_scale: F[H | B, H], optional: what 8-bit queries are multiplied by; None: 1
      k_scale: F[G | B, G], optional: the same for keys
      v_scale: F[G | B, G], optional: the same for values

    Returns
      out: T[B, Lq, H, E | Tq, H, E]: the weighted values
      lse: F[B, H, Lq | H, Tq] (when return_lse): log of the softmax's denominator
    """
@overload
def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: NDArray[Any] | None = None, sinks: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, cu_seqlens_q: NDArray[Any] | None = None, cu_seqlens_k: NDArray[Any] | None = None, return_lse: Literal[True], deterministic: bool = False, rotary: tuple[NDArray[Any], NDArray[Any]] | None = None, rotary_interleaved: bool = False, q_scale: NDArray[Any] | None = None, k_scale: NDArray[Any] | None = None, v_scale: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: NDArray[Any] | None = None, sinks: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, cu_seqlens_q: NDArray[Any] | None = None, cu_seqlens_k: NDArray[Any] | None = None, return_lse: bool = False, deterministic: bool = False, rotary: tuple[NDArray[Any], NDArray[Any]] | None = None, rotary_interleaved: bool = False, q_scale: NDArray[Any] | None = None, k_scale: NDArray[Any] | None = None, v_scale: NDArray[Any] | None = None) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: Literal[False] = False, deterministic: bool = False, rotary: tuple[Tensor, Tensor] | None = None, rotary_interleaved: bool = False, q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Tensor: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: Literal[True], deterministic: bool = False, rotary: tuple[Tensor, Tensor] | None = None, rotary_interleaved: bool = False, q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: bool = False, deterministic: bool = False, rotary: tuple[Tensor, Tensor] | None = None, rotary_interleaved: bool = False, q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(q: Array, k: Array, v: Array, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Array | None = None, sinks: Array | None = None, bias: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None, return_lse: Literal[False] = False, deterministic: bool = False, rotary: tuple[Array, Array] | None = None, rotary_interleaved: bool = False, q_scale: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None) -> Array: ...
@overload
def attention(q: Array, k: Array, v: Array, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Array | None = None, sinks: Array | None = None, bias: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None, return_lse: Literal[True], deterministic: bool = False, rotary: tuple[Array, Array] | None = None, rotary_interleaved: bool = False, q_scale: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None) -> tuple[Array, Array]: ...
@overload
def attention(q: Array, k: Array, v: Array, *, causal: bool = False, window: tuple[SupportsIndex, SupportsIndex] = (-1, -1), scale: SupportsFloat | None = None, softcap: SupportsFloat = 0.0, alibi_slopes: Array | None = None, sinks: Array | None = None, bias: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None, return_lse: bool = False, deterministic: bool = False, rotary: tuple[Array, Array] | None = None, rotary_interleaved: bool = False, q_scale: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None) -> Array | tuple[Array, Array]: ...

@overload
def causal_conv1d(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: NDArray[Any] | None = None, return_final_state: Literal[False] = False, cu_seqlens: NDArray[Any] | None = None) -> NDArray[Any]:
    """Depthwise causal convolution over L: y_t = act(bias + sum over k of weight[k] x_{t-(W-1)+k}), W
    from 2 to 8. With cu_seqlens, sequences stand packed one after another along L, in a batch of 1,
    and states have one row per sequence.

    Arguments
      x: T[B, L, D]: input
      weight: P[D, W]: taps, the oldest input's first
      bias: P[D], optional: added to each channel
      activation: choice (None, silu): of the sum
      initial_state: T[S, W-1, D], optional: the inputs before the first, oldest first; None: 0
      return_final_state: boolean: return final_state too
      cu_seqlens: J[S+1], optional: where each sequence begins along L, and L

    Returns
      y: T[B, L, D]: output
      final_state: T[S, W-1, D] (when return_final_state): the last W-1 inputs, oldest first
    """
@overload
def causal_conv1d(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: NDArray[Any] | None = None, return_final_state: Literal[True], cu_seqlens: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def causal_conv1d(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: NDArray[Any] | None = None, return_final_state: bool = False, cu_seqlens: NDArray[Any] | None = None) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Tensor | None = None, return_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None) -> Tensor: ...
@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Tensor | None = None, return_final_state: Literal[True], cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Tensor | None = None, return_final_state: bool = False, cu_seqlens: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Array | None = None, return_final_state: Literal[False] = False, cu_seqlens: Array | None = None) -> Array: ...
@overload
def causal_conv1d(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Array | None = None, return_final_state: Literal[True], cu_seqlens: Array | None = None) -> tuple[Array, Array]: ...
@overload
def causal_conv1d(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'silu'] = None, initial_state: Array | None = None, return_final_state: bool = False, cu_seqlens: Array | None = None) -> Array | tuple[Array, Array]: ...

@overload
def causal_conv1d_update(x: NDArray[Any], state: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'silu'] = None) -> NDArray[Any]:
    """The next step, or the next L steps, of causal_conv1d, from a state of the last W-1 inputs that
    is moved on in place.

    Arguments
      x: T[B, L, D | B, D]: input of one step, or of L
      state: T[B, W-1, D]: the inputs before, oldest first
      weight: P[D, W]: taps, the oldest input's first
      bias: P[D], optional: added to each channel
      activation: choice (None, silu): of the sum

    Returns
      y: T[B, L, D | B, D]: output
      new_state: @state (JAX; otherwise state is updated in place): the inputs before the next step
    """
@overload
def causal_conv1d_update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'silu'] = None) -> Tensor: ...
@overload
def causal_conv1d_update(x: Array, state: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'silu'] = None) -> tuple[Array, Array]: ...

@overload
def cross_entropy(logits: NDArray[Any], targets: NDArray[Any], *, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', inplace_backward: bool = False) -> NDArray[Any]:
    """loss_i = logsumexp(logits_i) - (1 - s) * logits_i[target_i] - s * mean(logits_i), where s is
    label_smoothing; 0 where target_i = ignore_index. The mean is over the targets that count.

    Arguments
      logits: T[N, V]: unnormalised log-probabilities
      targets: I[N]: the right column of each row
      ignore_index: integer: rows with this target count not
      label_smoothing: number, 0 to 1: share of the target that all classes have alike
      reduction: choice (none, mean, sum): what is returned: each row's loss, their mean or their sum
      inplace_backward: boolean: the backward writes the gradient over the input's memory

    Returns
      losses: F[N] (when reduction=none): one loss per row
      loss: F[] (when reduction!=none): mean or sum
    """
@overload
def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', inplace_backward: bool = False) -> Tensor: ...
@overload
def cross_entropy(logits: Array, targets: Array, *, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', inplace_backward: bool = False) -> Array: ...

@overload
def gated_ssm(x: NDArray[Any], dt: NDArray[Any], B: NDArray[Any], C: NDArray[Any]) -> NDArray[Any]:
    """y = u + (1 - g) u w_t with u = g s x, g = sigmoid(mean of dt), s = sigmoid(sum of B C) and
    weights w_t that fall by 0.9 a step into the past and sum to 1. No recurrence.

    Arguments
      x: T[B, L, D]: input
      dt: T[B, L, D]: its mean over D opens the gate
      B: T[B, L, N]: input to states
      C: T[B, L, N]: states to output

    Returns
      y: T[B, L, D]: output
    """
@overload
def gated_ssm(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor: ...
@overload
def gated_ssm(x: Array, dt: Array, B: Array, C: Array) -> Array: ...

@overload
def linear(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: NDArray[Any] | None = None, norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> NDArray[Any]:
    """y = act(x weight^T + bias) + residual: a linear layer, with all that follows it in one pass.
    With norm_weight, the norm of y is returned before y.

    Arguments
      x: T[..., K]: activations
      weight: P[N, K]: a row for each output column
      bias: P[N], optional: added to each row of the product
      activation: choice (None, gelu_tanh, gelu, silu, relu, relu2, tanh, sigmoid): of product and bias
      residual: T[..., N], optional: added to the output
      norm_weight: P[N], optional: of a norm of y, which is returned before y
      norm_bias: P[N], optional: of that norm, with norm="layer"
      norm: choice (rms, layer): as rms_norm or layer_norm
      norm_eps: number, at least 0: added to the norm's mean square or variance

    Returns
      normed: T[..., N] (when norm_weight): the norm of y
      y: T[..., N]: output
    """
@overload
def linear(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any] | None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Tensor | None = None, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Tensor: ...
@overload
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Tensor | None = None, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor]: ...
@overload
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Tensor | None = None, norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def linear(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Array | None = None, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Array: ...
@overload
def linear(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Array | None = None, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array]: ...
@overload
def linear(x: Array, weight: Array, bias: Array | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Array | None = None, norm_weight: Array | None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Array | tuple[Array, Array]: ...

@overload
def gated_linear(x: NDArray[Any], w_gate: NDArray[Any], w_up: NDArray[Any] | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = 'silu', recompute: bool = False) -> NDArray[Any]:
    """y = act(x w_gate^T) * (x w_up^T): a gated linear layer (SwiGLU with silu, GeGLU with gelu), both
    products in one pass. Without w_up, w_gate holds both, the gate's rows first.

    Arguments
      x: T[..., K]: activations
      w_gate: P[2*N, K] (without the factor where w_up is given): a row for each column of the gate, then of the up
      w_up: P[N, K], optional: a row for each output column
      activation: choice (None, gelu_tanh, gelu, silu, relu, relu2, tanh, sigmoid): of the gate
      recompute: boolean: the backward computes gate and up again, rather than the forward keeping them

    Returns
      y: T[..., N]: output
    """
@overload
def gated_linear(x: Tensor, w_gate: Tensor, w_up: Tensor | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = 'silu', recompute: bool = False) -> Tensor: ...
@overload
def gated_linear(x: Array, w_gate: Array, w_up: Array | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = 'silu', recompute: bool = False) -> Array: ...

@overload
def scaled_linear(x: NDArray[Any], weight: NDArray[Any], x_scale: NDArray[Any], weight_scale: NDArray[Any], bias: NDArray[Any] | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: NDArray[Any] | None = None) -> NDArray[Any]:
    """y = act((x x_scale) (weight weight_scale)^T + bias) + residual: a linear layer of 8-bit floats
    with their scales.

    Arguments
      x: T[..., K]: activations
      weight: T[N, K]: a row for each output column
      x_scale: F[1 | ..., X]: what x is multiplied by: one number, one for each row (X is 1), or one for each 128 columns of a row
      weight_scale: F[1 | U, V]: the same for weight: one number, one for each row (N, 1), or one for each block of 128 x 128
      bias: P[N], optional: added to each row of the product
      activation: choice (None, gelu_tanh, gelu, silu, relu, relu2, tanh, sigmoid): of product and bias
      residual: P[..., N], optional: added to what the activation gives

    Returns
      y: T[..., N]: output
    """
@overload
def scaled_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Tensor | None = None) -> Tensor: ...
@overload
def scaled_linear(x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None = None, *, activation: Literal[None, 'gelu_tanh', 'gelu', 'silu', 'relu', 'relu2', 'tanh', 'sigmoid'] = None, residual: Array | None = None) -> Array: ...

@overload
def linear_cross_entropy(x: NDArray[Any], weight: NDArray[Any], targets: NDArray[Any], *, bias: NDArray[Any] | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[False] = False) -> NDArray[Any]:
    """Cross-entropy of the logits x weight^T + bias, which are never in memory as a whole: loss_i =
    logsumexp(logits_i) - (1 - s) * logits_i[target_i] - s * mean(logits_i), where s is
    label_smoothing; 0 where target_i = ignore_index. The mean is over the targets that count.

    Arguments
      x: T[N, K]: what the head is given
      weight: P[V, K]: a row for each class
      targets: I[N]: the right class of each row
      bias: P[V], optional: added to each row of logits
      ignore_index: integer: rows with this target count not
      label_smoothing: number, 0 to 1: share of the target that all classes have alike
      reduction: choice (none, mean, sum): what is returned: each row's loss, their mean or their sum
      softcap: number, at least 0: logits become softcap * tanh(logits / softcap); 0: they stay
      return_lse: boolean: also return lse

    Returns
      losses: F[N] (when reduction=none): one loss per row
      loss: F[] (when reduction!=none): mean or sum
      lse: F[N] (when return_lse): log(sum(exp(logits))) of each row
    """
@overload
def linear_cross_entropy(x: NDArray[Any], weight: NDArray[Any], targets: NDArray[Any], *, bias: NDArray[Any] | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[True]) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(x: NDArray[Any], weight: NDArray[Any], targets: NDArray[Any], *, bias: NDArray[Any] | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: bool = False) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[False] = False) -> Tensor: ...
@overload
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(x: Array, weight: Array, targets: Array, *, bias: Array | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[False] = False) -> Array: ...
@overload
def linear_cross_entropy(x: Array, weight: Array, targets: Array, *, bias: Array | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: Literal[True]) -> tuple[Array, Array]: ...
@overload
def linear_cross_entropy(x: Array, weight: Array, targets: Array, *, bias: Array | None = None, ignore_index: SupportsIndex = -100, label_smoothing: SupportsFloat = 0.0, reduction: Literal['none', 'mean', 'sum'] = 'mean', softcap: SupportsFloat = 0.0, return_lse: bool = False) -> Array | tuple[Array, Array]: ...

@overload
def merge_attention_states(outs: NDArray[Any] | Sequence[NDArray[Any]], lses: NDArray[Any] | Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Combines attentions of the same queries over disjoint keys into the attention over all of them,
    from each part's output and lse. Outputs stand in a batch (B, L, H, E) or packed (N, H, E), as
    attention gives them.

    Arguments
      outs: T[S, B, L, H, E | S, N, H, E], or a list of its parts: the output of each part
      lses: F[S, B, H, L | S, H, N], or a list of its parts: of each part, the log of the softmax's denominator; -inf where it saw no key

    Returns
      out: T[B, L, H, E | N, H, E]: the output over all keys
      lse: F[B, H, L | H, N]: log of the softmax's denominator over them
    """
@overload
def merge_attention_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]: ...
@overload
def merge_attention_states(outs: Array | Sequence[Array], lses: Array | Sequence[Array]) -> tuple[Array, Array]: ...

@overload
def rms_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, *, residual: None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: NDArray[Any] | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> NDArray[Any]:
    """Root-mean-square norm over the last axis: y = s * rsqrt(mean(s^2) + eps) * (weight +
    weight_offset), where s = x, or x + residual if a residual is given; then s is returned too.
    With a gate, s silu(gate) is normalised, or with norm_before_gate y is multiplied by silu(gate).
    With group_size, each so many columns have a norm of their own.

    Arguments
      x: T[..., N]: activations
      weight: P[N], optional: scale of each column
      residual: T[..., N], optional: added to x first
      eps: number, at least 0: added to the mean square
      weight_offset: number: added to weight (Gemma's weights are stored minus 1)
      gate: T[..., N], optional: what s, or y, is multiplied by the silu of
      norm_before_gate: boolean: the gate multiplies y, not s
      group_size: integer, at least 0: columns that are normalised together; None or 0: all

    Returns
      y: T[..., N]: the normalised rows
      sum: T[..., N] (when residual): x + residual
    """
@overload
def rms_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, *, residual: NDArray[Any], eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: NDArray[Any] | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def rms_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, *, residual: NDArray[Any] | None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: NDArray[Any] | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def rms_norm(x: Tensor, weight: Tensor | None = None, *, residual: None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Tensor | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor | None = None, *, residual: Tensor, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Tensor | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Tensor | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def rms_norm(x: Array, weight: Array | None = None, *, residual: None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Array | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> Array: ...
@overload
def rms_norm(x: Array, weight: Array | None = None, *, residual: Array, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Array | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> tuple[Array, Array]: ...
@overload
def rms_norm(x: Array, weight: Array | None = None, *, residual: Array | None = None, eps: SupportsFloat = 1e-06, weight_offset: SupportsFloat = 0.0, gate: Array | None = None, norm_before_gate: bool = False, group_size: SupportsIndex | None = None) -> Array | tuple[Array, Array]: ...

@overload
def layer_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, *, residual: None = None, eps: SupportsFloat = 1e-05) -> NDArray[Any]:
    """Layer norm over the last axis: y = (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias, where s
    = x, or x + residual if a residual is given; then s is returned too.

    Arguments
      x: T[..., N]: activations
      weight: P[N], optional: scale of each column
      bias: P[N], optional: shift of each column
      residual: T[..., N], optional: added to x first
      eps: number, at least 0: added to the variance

    Returns
      y: T[..., N]: the normalised rows
      sum: T[..., N] (when residual): x + residual
    """
@overload
def layer_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, *, residual: NDArray[Any], eps: SupportsFloat = 1e-05) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def layer_norm(x: NDArray[Any], weight: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, *, residual: NDArray[Any] | None = None, eps: SupportsFloat = 1e-05) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: None = None, eps: SupportsFloat = 1e-05) -> Tensor: ...
@overload
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor, eps: SupportsFloat = 1e-05) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None, eps: SupportsFloat = 1e-05) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: None = None, eps: SupportsFloat = 1e-05) -> Array: ...
@overload
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: Array, eps: SupportsFloat = 1e-05) -> tuple[Array, Array]: ...
@overload
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: Array | None = None, eps: SupportsFloat = 1e-05) -> Array | tuple[Array, Array]: ...

@overload
def sum(x: NDArray[Any], axis: SupportsIndex | None = None) -> NDArray[Any]:
    """Sum along an axis, or of everything (axis=None), accumulated in float32.

    Arguments
      x: T[..., N]: what to add up
      axis: axis: the axis to reduce; None: all of them

    Returns
      y: T[...]: the sums
    """
@overload
def sum(x: Tensor, axis: SupportsIndex | None = None) -> Tensor: ...
@overload
def sum(x: Array, axis: SupportsIndex | None = None) -> Array: ...

@overload
def max(x: NDArray[Any], axis: SupportsIndex | None = None) -> NDArray[Any]:
    """Largest entry along an axis, or of everything (axis=None). NaN wins over any number.

    Arguments
      x: T[..., N]: where to look
      axis: axis: the axis to reduce; None: all of them

    Returns
      y: T[...]: the largest entries
    """
@overload
def max(x: Tensor, axis: SupportsIndex | None = None) -> Tensor: ...
@overload
def max(x: Array, axis: SupportsIndex | None = None) -> Array: ...

@overload
def lstm(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, c0: NDArray[Any] | None = None, *, w_hr: NDArray[Any] | None = None, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """A layer of an LSTM over whole sequences: gates i, f, g, o of W_ih x + b_ih + W_hh h + b_hh, c =
    f c + i g, h = o tanh(c), or w_hr times that. With cu_seqlens, sequences stand packed one after
    another along L, in a batch of 1, and states have one row per sequence. With residual, y has
    that added, the h that recurs has not; with norm_weight, the norm of y is returned before y.

    Arguments
      x: T[B, L, I]: input
      w_ih: P[4*H, I]: input to gates
      w_hh: P[4*H, R]: the last output to gates; R is H without w_hr
      b_ih: P[4*H], optional: added to the gates
      b_hh: P[4*H], optional: added to the gates as well
      h0: P[S, R], optional: the output before the first step; None: 0
      c0: P[S, H], optional: the cell before the first step; None: 0
      w_hr: P[R, H], optional: projects o tanh(c) to the output
      cu_seqlens: J[S+1], optional: where each sequence begins along L, and L
      reverse: boolean: walk each sequence from its end
      residual: T[B, L, R], optional: added to the output
      norm_weight: P[R], optional: of a norm of y, which is returned before y
      norm_bias: P[R], optional: of that norm, with norm="layer"
      norm: choice (rms, layer): as rms_norm or layer_norm
      norm_eps: number, at least 0: added to the norm's mean square or variance

    Returns
      normed: T[B, L, R] (when norm_weight): the norm of y
      y: T[B, L, R]: the output of every step
      h: F[S, R]: the output of the last step
      c: F[S, H]: the cell after the last step
    """
@overload
def lstm(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, c0: NDArray[Any] | None = None, *, w_hr: NDArray[Any] | None = None, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any], norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def lstm(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, c0: NDArray[Any] | None = None, *, w_hr: NDArray[Any] | None = None, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: None = None, norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def lstm(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, c0: NDArray[Any] | None = None, *, w_hr: NDArray[Any] | None = None, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any], norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def lstm(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, c0: NDArray[Any] | None = None, *, w_hr: NDArray[Any] | None = None, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any] | None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None, *, w_hr: Tensor | None = None, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None, *, w_hr: Tensor | None = None, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None, *, w_hr: Tensor | None = None, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: None = None, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None, *, w_hr: Tensor | None = None, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None, *, w_hr: Tensor | None = None, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor | None = None, norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def lstm(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, c0: Array | None = None, *, w_hr: Array | None = None, cu_seqlens: Array | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array]: ...
@overload
def lstm(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, c0: Array | None = None, *, w_hr: Array | None = None, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array]: ...
@overload
def lstm(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, c0: Array | None = None, *, w_hr: Array | None = None, cu_seqlens: Array | None = None, reverse: bool = False, residual: None = None, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array, Array]: ...
@overload
def lstm(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, c0: Array | None = None, *, w_hr: Array | None = None, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array, Array]: ...
@overload
def lstm(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, c0: Array | None = None, *, w_hr: Array | None = None, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array | None = None, norm_weight: Array | None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]: ...

@overload
def gru(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, *, reset_after: bool = True, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]]:
    """A layer of a GRU over whole sequences: gates r, z, n, h = (1 - z) n + z h. The reset gate r
    meets W_hn h + b_hn (reset_after, as in torch), or h before that product (Keras, ONNX). With
    cu_seqlens, sequences stand packed one after another along L, in a batch of 1, and states have
    one row per sequence. With residual, y has that added, the h that recurs has not; with
    norm_weight, the norm of y is returned before y.

    Arguments
      x: T[B, L, I]: input
      w_ih: P[3*H, I]: input to gates
      w_hh: P[3*H, H]: the last output to gates
      b_ih: P[3*H], optional: added to the product with x
      b_hh: P[3*H], optional: added to the product with h
      h0: P[S, H], optional: the output before the first step; None: 0
      reset_after: boolean: the reset gate meets the product with h, not h itself
      cu_seqlens: J[S+1], optional: where each sequence begins along L, and L
      reverse: boolean: walk each sequence from its end
      residual: T[B, L, H], optional: added to the output
      norm_weight: P[H], optional: of a norm of y, which is returned before y
      norm_bias: P[H], optional: of that norm, with norm="layer"
      norm: choice (rms, layer): as rms_norm or layer_norm
      norm_eps: number, at least 0: added to the norm's mean square or variance

    Returns
      normed: T[B, L, H] (when norm_weight): the norm of y
      y: T[B, L, H]: the output of every step
      h: F[S, H]: the output of the last step
    """
@overload
def gru(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, *, reset_after: bool = True, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any], norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def gru(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, *, reset_after: bool = True, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: None = None, norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def gru(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, *, reset_after: bool = True, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any], norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def gru(x: NDArray[Any], w_ih: NDArray[Any], w_hh: NDArray[Any], b_ih: NDArray[Any] | None = None, b_hh: NDArray[Any] | None = None, h0: NDArray[Any] | None = None, *, reset_after: bool = True, cu_seqlens: NDArray[Any] | None = None, reverse: bool = False, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any] | None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]] | tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, *, reset_after: bool = True, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor]: ...
@overload
def gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, *, reset_after: bool = True, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor]: ...
@overload
def gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, *, reset_after: bool = True, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: None = None, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, *, reset_after: bool = True, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None, h0: Tensor | None = None, *, reset_after: bool = True, cu_seqlens: Tensor | None = None, reverse: bool = False, residual: Tensor | None = None, norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
@overload
def gru(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, *, reset_after: bool = True, cu_seqlens: Array | None = None, reverse: bool = False, residual: None = None, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array]: ...
@overload
def gru(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, *, reset_after: bool = True, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array]: ...
@overload
def gru(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, *, reset_after: bool = True, cu_seqlens: Array | None = None, reverse: bool = False, residual: None = None, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array]: ...
@overload
def gru(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, *, reset_after: bool = True, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array]: ...
@overload
def gru(x: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None, h0: Array | None = None, *, reset_after: bool = True, cu_seqlens: Array | None = None, reverse: bool = False, residual: Array | None = None, norm_weight: Array | None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array] | tuple[Array, Array, Array]: ...

@overload
def rope(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], *, positions: NDArray[Any] | None = None, interleaved: bool = False, inplace: bool = False) -> NDArray[Any]:
    """Rotates the first 2R entries of each head by the tables' angle at the token's position.

    Arguments
      x: T[B, L, H, D]: queries or keys
      cos: P[M, R]: cosines by position; 2R <= D
      sin: P[M, R]: sines by position
      positions: I[L | B, L], optional: row of the tables for each token; None: 0 to L-1
      interleaved: boolean: pairs are neighbours, not halves
      inplace: boolean: overwrite the input and return it

    Returns
      y: T[B, L, H, D]: rotated x
    """
@overload
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False, inplace: bool = False) -> Tensor: ...
@overload
def rope(x: Array, cos: Array, sin: Array, *, positions: Array | None = None, interleaved: bool = False, inplace: bool = False) -> Array: ...

@overload
def selective_scan(u: NDArray[Any], delta: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, delta_bias: NDArray[Any] | None = None, delta_softplus: bool = False, initial_state: NDArray[Any] | None = None, return_last_state: Literal[False] = False, cu_seqlens: NDArray[Any] | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: NDArray[Any] | None = None, norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> NDArray[Any]:
    """Mamba's selective scan: h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, y_t = (C_t . h_t + D u_t)
    silu(z_t), with dt = softplus(delta + delta_bias) or delta + delta_bias. Every D / G channels
    share B and C. With cu_seqlens, sequences stand packed one after another along L, in a batch of
    1, and states have one row per sequence. With residual, y has that added; with norm_weight, the
    norm of y over D is returned before y.

    Arguments
      u: T[B, L, D]: input
      delta: T[B, L, D]: time steps
      A: F[D, N]: decay of each state; negative as a rule
      B: T[B, L, G, N | B, L, N]: input to states
      C: T[B, L, G, N | B, L, N]: states to output
      D: P[D], optional: input to output
      z: T[B, L, D], optional: gate: y is multiplied by silu(z)
      delta_bias: P[D], optional: added to delta
      delta_softplus: boolean: delta goes through log(1 + exp(x)) after the bias
      initial_state: P[S, D, N], optional: the state before the first step; None: 0
      return_last_state: boolean: return last_state too
      cu_seqlens: J[S+1], optional: where each sequence begins along L, and L
      algorithm: choice (auto, sequential, blelloch, hillis_steele, chunked, cumsum): how the recurrence is computed
      checkpoint: integer, at least -1: steps between the states kept for the backward: 1 keeps all, 0 none, -1 takes the square root of L
      residual: T[B, L, D], optional: added to the output
      norm_weight: P[D], optional: of a norm of y, which is returned before y
      norm_bias: P[D], optional: of that norm, with norm="layer"
      norm: choice (rms, layer): as rms_norm or layer_norm
      norm_eps: number, at least 0: added to the norm's mean square or variance

    Returns
      normed: T[B, L, D] (when norm_weight): the norm of y
      y: T[B, L, D]: output
      last_state: F[S, D, N] (when return_last_state): the state after the last step
    """
@overload
def selective_scan(u: NDArray[Any], delta: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, delta_bias: NDArray[Any] | None = None, delta_softplus: bool = False, initial_state: NDArray[Any] | None = None, return_last_state: Literal[True], cu_seqlens: NDArray[Any] | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: NDArray[Any] | None = None, norm_weight: None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def selective_scan(u: NDArray[Any], delta: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, delta_bias: NDArray[Any] | None = None, delta_softplus: bool = False, initial_state: NDArray[Any] | None = None, return_last_state: Literal[False] = False, cu_seqlens: NDArray[Any] | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def selective_scan(u: NDArray[Any], delta: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, delta_bias: NDArray[Any] | None = None, delta_softplus: bool = False, initial_state: NDArray[Any] | None = None, return_last_state: Literal[True], cu_seqlens: NDArray[Any] | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any], norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def selective_scan(u: NDArray[Any], delta: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, delta_bias: NDArray[Any] | None = None, delta_softplus: bool = False, initial_state: NDArray[Any] | None = None, return_last_state: bool = False, cu_seqlens: NDArray[Any] | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: NDArray[Any] | None = None, norm_weight: NDArray[Any] | None = None, norm_bias: NDArray[Any] | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]] | tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None, return_last_state: Literal[False] = False, cu_seqlens: Tensor | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Tensor | None = None, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Tensor: ...
@overload
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None, return_last_state: Literal[True], cu_seqlens: Tensor | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Tensor | None = None, norm_weight: None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None, return_last_state: Literal[False] = False, cu_seqlens: Tensor | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Tensor | None = None, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None, return_last_state: Literal[True], cu_seqlens: Tensor | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Tensor | None = None, norm_weight: Tensor, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None, return_last_state: bool = False, cu_seqlens: Tensor | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Tensor | None = None, norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
@overload
def selective_scan(u: Array, delta: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, delta_bias: Array | None = None, delta_softplus: bool = False, initial_state: Array | None = None, return_last_state: Literal[False] = False, cu_seqlens: Array | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Array | None = None, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Array: ...
@overload
def selective_scan(u: Array, delta: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, delta_bias: Array | None = None, delta_softplus: bool = False, initial_state: Array | None = None, return_last_state: Literal[True], cu_seqlens: Array | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Array | None = None, norm_weight: None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array]: ...
@overload
def selective_scan(u: Array, delta: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, delta_bias: Array | None = None, delta_softplus: bool = False, initial_state: Array | None = None, return_last_state: Literal[False] = False, cu_seqlens: Array | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Array | None = None, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array]: ...
@overload
def selective_scan(u: Array, delta: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, delta_bias: Array | None = None, delta_softplus: bool = False, initial_state: Array | None = None, return_last_state: Literal[True], cu_seqlens: Array | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Array | None = None, norm_weight: Array, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> tuple[Array, Array, Array]: ...
@overload
def selective_scan(u: Array, delta: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, delta_bias: Array | None = None, delta_softplus: bool = False, initial_state: Array | None = None, return_last_state: bool = False, cu_seqlens: Array | None = None, algorithm: Literal['auto', 'sequential', 'blelloch', 'hillis_steele', 'chunked', 'cumsum'] = 'auto', checkpoint: SupportsIndex = 32, residual: Array | None = None, norm_weight: Array | None = None, norm_bias: Array | None = None, norm: Literal['rms', 'layer'] = 'rms', norm_eps: SupportsFloat = 1e-06) -> Array | tuple[Array, Array] | tuple[Array, Array, Array]: ...

@overload
def selective_state_update(state: NDArray[Any], x: NDArray[Any], dt: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, dt_bias: NDArray[Any] | None = None, dt_softplus: bool = False) -> NDArray[Any]:
    """One step of the selective scan: state = exp(dt A) state + dt B x, in place, and y = (C . state +
    D x) silu(z). Every D / G channels (H / G heads) share B and C.

    Arguments
      state: P[B, D, N | B, H, P, N]: before the step
      x: T[B, D | B, H, P]: input
      dt: T[B, D | B, H, P]: time step
      A: F[D, N | H, P, N]: decay of each state; negative as a rule
      B: T[B, N | B, G, N]: input to states
      C: T[B, N | B, G, N]: states to output
      D: P[D | H, P], optional: input to output
      z: T[B, D | B, H, P], optional: gate: y is multiplied by silu(z)
      dt_bias: P[D | H, P], optional: added to dt
      dt_softplus: boolean: dt goes through log(1 + exp(x)) after the bias

    Returns
      y: T[B, D | B, H, P]: output
      new_state: @state (JAX; otherwise state is updated in place): after the step
    """
@overload
def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False) -> Tensor: ...
@overload
def selective_state_update(state: Array, x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False) -> tuple[Array, Array]: ...

@overload
def softmax(x: NDArray[Any], axis: SupportsIndex = -1) -> NDArray[Any]:
    """y = exp(x - logsumexp(x)) along an axis.

    Arguments
      x: T[..., N]: logits
      axis: axis: the axis whose entries sum to 1

    Returns
      y: T[..., N]: probabilities
    """
@overload
def softmax(x: Tensor, axis: SupportsIndex = -1) -> Tensor: ...
@overload
def softmax(x: Array, axis: SupportsIndex = -1) -> Array: ...

@overload
def log_softmax(x: NDArray[Any], axis: SupportsIndex = -1) -> NDArray[Any]:
    """y = x - logsumexp(x) along an axis.

    Arguments
      x: T[..., N]: logits
      axis: axis: the axis to normalise along

    Returns
      y: T[..., N]: log-probabilities
    """
@overload
def log_softmax(x: Tensor, axis: SupportsIndex = -1) -> Tensor: ...
@overload
def log_softmax(x: Array, axis: SupportsIndex = -1) -> Array: ...

@overload
def logsumexp(x: NDArray[Any], axis: SupportsIndex = -1) -> NDArray[Any]:
    """lse = log(sum(exp(x))) along an axis, in float32. An empty axis, or one of -inf, gives -inf.

    Arguments
      x: T[..., N]: logits
      axis: axis: the axis to reduce

    Returns
      lse: F[...]: logsumexp of each row
    """
@overload
def logsumexp(x: Tensor, axis: SupportsIndex = -1) -> Tensor: ...
@overload
def logsumexp(x: Array, axis: SupportsIndex = -1) -> Array: ...

@overload
def ssd(x: NDArray[Any], dt: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, dt_bias: NDArray[Any] | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: NDArray[Any] | None = None, return_final_state: Literal[False] = False, cu_seqlens: NDArray[Any] | None = None, chunk_size: SupportsIndex | None = None) -> NDArray[Any]:
    """Mamba-2's scan (state-space duality): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = (h_t C_t
    + D x_t) silu(z_t), with dt clamped to dt_limit after its bias and softplus. Every H / G heads
    share B and C. With cu_seqlens, sequences stand packed one after another along L, in a batch of
    1, and states have one row per sequence.

    Arguments
      x: T[B, L, H, P]: input, of H heads
      dt: T[B, L, H]: time steps
      A: F[H]: decay of each head; negative as a rule
      B: T[B, L, G, N]: input to states
      C: T[B, L, G, N]: states to output
      D: P[H, (P)], optional: input to output
      z: T[B, L, H, P], optional: gate: y is multiplied by silu(z)
      dt_bias: P[H], optional: added to dt
      dt_softplus: boolean: dt goes through log(1 + exp(x)) after the bias
      dt_limit: the tuple (dt_limit_min, dt_limit_max)
      dt_limit_min: number: the least that dt is then raised to
      dt_limit_max: number: the most that it is lowered to
      initial_state: P[S, H, P, N], optional: the state before the first step; None: 0
      return_final_state: boolean: return final_state too
      cu_seqlens: J[S+1], optional: where each sequence begins along L, and L
      chunk_size: integer, at least 0: the most steps of a chunk, which changes roundings and time only; None or 0: as suits the kernel

    Returns
      y: T[B, L, H, P]: output
      final_state: F[S, H, P, N] (when return_final_state): the state after the last step
    """
@overload
def ssd(x: NDArray[Any], dt: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, dt_bias: NDArray[Any] | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: NDArray[Any] | None = None, return_final_state: Literal[True], cu_seqlens: NDArray[Any] | None = None, chunk_size: SupportsIndex | None = None) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def ssd(x: NDArray[Any], dt: NDArray[Any], A: NDArray[Any], B: NDArray[Any], C: NDArray[Any], D: NDArray[Any] | None = None, *, z: NDArray[Any] | None = None, dt_bias: NDArray[Any] | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: NDArray[Any] | None = None, return_final_state: bool = False, cu_seqlens: NDArray[Any] | None = None, chunk_size: SupportsIndex | None = None) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Tensor | None = None, return_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, chunk_size: SupportsIndex | None = None) -> Tensor: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Tensor | None = None, return_final_state: Literal[True], cu_seqlens: Tensor | None = None, chunk_size: SupportsIndex | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Tensor | None = None, return_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_size: SupportsIndex | None = None) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def ssd(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Array | None = None, return_final_state: Literal[False] = False, cu_seqlens: Array | None = None, chunk_size: SupportsIndex | None = None) -> Array: ...
@overload
def ssd(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Array | None = None, return_final_state: Literal[True], cu_seqlens: Array | None = None, chunk_size: SupportsIndex | None = None) -> tuple[Array, Array]: ...
@overload
def ssd(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[SupportsFloat, SupportsFloat] = (0.0, float("inf")), initial_state: Array | None = None, return_final_state: bool = False, cu_seqlens: Array | None = None, chunk_size: SupportsIndex | None = None) -> Array | tuple[Array, Array]: ...

__all__ = [
    "Error",
    "Model",
    "PackedLinear",
    "Tokenizer",
    "build_info",
    "force_implementation",
    "load",
    "num_threads",
    "set_cpu_target",
    "set_num_threads",
    "attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "cross_entropy",
    "gated_ssm",
    "linear",
    "gated_linear",
    "scaled_linear",
    "linear_cross_entropy",
    "merge_attention_states",
    "rms_norm",
    "layer_norm",
    "lstm",
    "gru",
    "rope",
    "selective_scan",
    "selective_state_update",
    "softmax",
    "log_softmax",
    "logsumexp",
    "ssd",
]

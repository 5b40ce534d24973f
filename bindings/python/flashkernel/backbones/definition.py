"""The ops that backbones are made of, defined in plain NumPy: in the dtype of what comes, one
formula each, at no speed. Arguments are those of `flashkernel`'s functions of the same names."""

import numpy as np


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0, x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear(x, weight, bias=None, *, activation=None, residual=None):
    y = x @ weight.T
    y = y if bias is None else y + bias
    y = gelu_tanh(y) if activation == "gelu_tanh" else y
    return y if residual is None else y + residual


def rms_norm(x, weight, *, residual=None, eps=1e-6):
    s = x if residual is None else x + residual
    y = s / np.sqrt((s * s).mean(-1, keepdims=True) + eps) * weight
    return y if residual is None else (y, s)


def layer_norm(x, weight, bias, *, residual=None, eps=1e-5):
    s = x if residual is None else x + residual
    centred = s - s.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias
    return y if residual is None else (y, s)


def causal_conv1d(x, weight, bias, *, activation=None):
    length, width = x.shape[1], weight.shape[1]
    padded = np.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    y = bias + sum(weight[:, k] * padded[:, k : k + length] for k in range(width))
    return silu(y) if activation == "silu" else y


def causal_conv1d_update(x, state, weight, bias, *, activation=None):
    frames = np.concatenate([state, x[:, None]], 1)
    state[:] = frames[:, 1:]
    y = bias + (weight.T * frames).sum(1)
    return silu(y) if activation == "silu" else y


def selective_state_update(state, x, dt, A, B, C, D, *, z=None, dt_bias=0.0, dt_softplus=False):
    """The recurrence of Mamba: each channel's states decay by exp(dt A) and take in dt B x."""
    dt = softplus(dt + dt_bias) if dt_softplus else dt + dt_bias
    state[:] = np.exp(dt[..., None] * A) * state + (dt * x)[..., None] * B[:, None]
    y = (state * C[:, None]).sum(-1) + D * x
    return y if z is None else y * silu(z)


def selective_scan(u, delta, A, B, C, D, *, z=None, delta_bias=0.0, delta_softplus=False):
    state, y = np.zeros((u.shape[0], *A.shape), A.dtype), np.zeros_like(u)
    for t in range(u.shape[1]):
        y[:, t] = selective_state_update(
            state, u[:, t], delta[:, t], A, B[:, t], C[:, t], D,
            dt_bias=delta_bias, dt_softplus=delta_softplus,
        )  # fmt: skip
    return y if z is None else y * silu(z)


def gated_ssm(x, dt, B, C):
    """Gates of each frame's own, and each frame's weight in its window by its age."""
    g = sigmoid(dt.mean(-1, keepdims=True))
    u = g * sigmoid((B * C).sum(-1, keepdims=True)) * x
    weight = 0.9 ** np.arange(x.shape[1])[::-1, None]
    return u + (1 - g) * u * (weight / weight.sum())


def attention(q, k, v, *, causal=False, window=(-1, -1), rotary=None):
    """The last query stands beside the last key. window: (earlier, later) keys that a query sees;
    -1 is all of them."""
    queries, keys = q.shape[1], k.shape[1]
    i, j = np.arange(keys - queries, keys)[:, None], np.arange(keys)
    if rotary is not None:
        q, k = (_rotated(t, rotary, at) for t, at in ((q, i[:, 0]), (k, j)))
    seen = j <= i if causal else np.full((queries, keys), True)
    for limit, age in zip(window, (i - j, j - i), strict=True):
        seen = seen & (age <= limit) if limit >= 0 else seen
    scores = np.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


def _rotated(x, rotary, positions):
    cos, sin = (table[positions, None] for table in rotary)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def lstm(x, w_ih, w_hh, b_ih, b_hh, h0=None, c0=None):
    h = np.zeros((x.shape[0], w_hh.shape[1]), x.dtype) if h0 is None else h0
    c = np.zeros_like(h) if c0 is None else c0
    y = []
    for frame in x.swapaxes(0, 1):
        i, f, g, o = np.split(linear(frame, w_ih, b_ih) + linear(h, w_hh, b_hh), 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        y.append(h)
    return np.stack(y, 1), h, c


def gru(x, w_ih, w_hh, b_ih, b_hh, h0=None):
    h = np.zeros((x.shape[0], w_hh.shape[1]), x.dtype) if h0 is None else h0
    y = []
    for frame in x.swapaxes(0, 1):
        of_x, of_h = (
            np.split(t, 3, -1) for t in (linear(frame, w_ih, b_ih), linear(h, w_hh, b_hh))
        )
        r, z = (sigmoid(a + b) for a, b in zip(of_x[:2], of_h[:2], strict=True))
        h = (1 - z) * np.tanh(of_x[2] + r * of_h[2]) + z * h
        y.append(h)
    return np.stack(y, 1), h

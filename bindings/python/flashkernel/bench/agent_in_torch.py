"""The backbones in torch's own ops, of a backbone's weights: plain, in any dtype, every frame of a
window, or frame by frame. What tests hold `flashkernel.torch.backbones` against, and what its peers
compute."""

import math

import torch
import torch.nn.functional as F

from flashkernel.torch import backbones
from flashkernel.torch.backbones import attention, gated_ssm, mamba, mlp, recurrent


class PlainBackbone(torch.nn.Module):
    """forward(x): x (B, L, input_size) -> (B, L, hidden). step(x, state): x (B, input_size) ->
    (out (B, hidden), state), each block's state being a tuple of tensors whose shapes stay."""

    def __init__(self, net: backbones.Backbone):
        super().__init__()
        self.net = net

    def forward(self, x):
        stream = linear(self.net.embed, x)
        for block, norm in zip(self.net.blocks, self.net.norms, strict=False):
            stream = stream + PLAIN[type(block)](block, normed(norm, stream))
        return normed(self.net.norms[-1], stream)

    def init_state(self, batch):
        like = self.net.embed.weight
        return [FIRST_STATES[type(block)](block, batch, like) for block in self.net.blocks]

    def step(self, x, state):
        stream, after = linear(self.net.embed, x), []
        for block, norm, own in zip(self.net.blocks, self.net.norms, state, strict=False):
            y, own = STEPS[type(block)](block, normed(norm, stream), own)
            stream = stream + y
            after.append(own)
        return normed(self.net.norms[-1], stream), after


def linear(layer, x):
    return F.linear(x, layer.weight, layer.bias)


def normed(norm, x):
    if isinstance(norm, torch.nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if torch.onnx.is_in_onnx_export():  # which has no such operator
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)


def feed_forward(block, x):
    return linear(block.mixer.down, F.gelu(linear(block.mixer.up, x), approximate="tanh"))


def convolved(conv, x):
    width = conv.kernel_size[0]
    x = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(x, conv.weight, conv.bias, groups=conv.groups)).transpose(1, 2)


def mamba_layer(block, x):
    m = block.mixer
    u, z = linear(m.in_proj, x).chunk(2, -1)
    u = convolved(m.conv1d, u)
    dt, B, C = linear(m.x_proj, u).split([m.dt_rank, m.d_state, m.d_state], -1)
    dt = F.softplus(linear(m.dt_proj, dt))
    A = -torch.exp(m.A_log)
    h, y = torch.zeros_like(u[:, 0, :, None] * A), []
    for t in range(u.shape[1]):
        added = (dt[:, t] * u[:, t]).unsqueeze(-1) * B[:, t, None]
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h + added
        y.append((h * C[:, t, None]).sum(-1) + m.D * u[:, t])
    return linear(m.out_proj, torch.stack(y, 1) * F.silu(z))


def gated_layer(block, x):
    u, z = linear(block.in_proj, x).chunk(2, -1)
    return gated_output(block, convolved(block.conv1d, u), z)


def gated_output(block, u, z):
    dt, B, C = linear(block.x_proj, u).split([1, block.d_state, block.d_state], -1)
    gate, selected = torch.sigmoid(dt), torch.sigmoid((B * C).sum(-1, keepdim=True))
    y = gate * selected * u * (2 - gate)
    return linear(block.out_proj, y * F.silu(z))


def rotated(x, first=0):
    """Rotary positions from `first` on of x (B, L, heads, head_dim)."""
    half = x.shape[-1] // 2
    made = {"dtype": x.dtype, "device": x.device}
    angles = torch.outer(
        torch.arange(first, first + x.shape[1], **made),
        10000.0 ** (-torch.arange(0, 2 * half, 2, **made) / (2 * half)),
    )[:, None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention_layer(block, x):
    q, k, v = linear(block.qkv, x).unflatten(-1, (3, block.heads, block.head_dim)).unbind(-3)
    if block.q_norm is not None:
        q, k = normed(block.q_norm, q), normed(block.k_norm, k)
    q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
    frames = torch.arange(x.shape[1], device=x.device)
    age = frames[:, None] - frames
    seen = (age >= 0) & (age < block.window)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(block.head_dim)).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1) @ v
    return linear(block.out_proj, y.transpose(1, 2).flatten(-2))


def recurrent_layer(block, x):
    m = block.mixer
    parameters = [m.weight_ih_l0, m.weight_hh_l0, m.bias_ih_l0, m.bias_hh_l0]
    kind = torch.lstm if m.states == 2 else torch.gru
    h = x.new_zeros(1, x.shape[0], m.hidden_size)
    state = (h, h) if m.states == 2 else h
    return kind(x, state, parameters, True, 1, 0.0, False, False, True)[0]


# --- one frame ------------------------------------------------------------------------------------


def convolved_step(conv, x, recent):
    frames = torch.cat([recent, x[:, None]], 1)
    y = F.silu((conv.weight[:, 0].T * frames).sum(1) + conv.bias)
    return y, frames[:, 1:]


def mamba_step(block, x, state):
    m, (recent, h) = block.mixer, state
    u, z = linear(m.in_proj, x).chunk(2, -1)
    u, recent = convolved_step(m.conv1d, u, recent)
    dt, B, C = linear(m.x_proj, u).split([m.dt_rank, m.d_state, m.d_state], -1)
    dt = F.softplus(linear(m.dt_proj, dt))
    decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(m.A_log))
    h = decay * h + (dt * u).unsqueeze(-1) * B[:, None]
    y = (h * C[:, None]).sum(-1) + m.D * u
    return linear(m.out_proj, y * F.silu(z)), (recent, h)


def mamba_first(block, batch, like):
    m = block.mixer
    recent = like.new_zeros(batch, m.d_conv - 1, m.d_inner)
    return recent, like.new_zeros(batch, m.d_inner, m.d_state)


def gated_step(block, x, state):
    u, z = linear(block.in_proj, x).chunk(2, -1)
    u, recent = convolved_step(block.conv1d, u, *state)
    return gated_output(block, u, z), (recent,)


def attention_step(block, x, state):
    """Keys and values of a whole window, of which the newest `count` are frames."""
    kept, count = state
    qkv = linear(block.qkv, x).unflatten(-1, (3, block.heads, block.head_dim))
    q, k, v = qkv[:, None].unbind(2)
    if block.q_norm is not None:
        q, k = normed(block.q_norm, q), normed(block.k_norm, k)
    kept = torch.cat([kept[:, 1:], torch.stack([k, v], 2)], 1)
    count = count + 1
    k, v = kept.unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (rotated(q, block.window - 1), rotated(k), v))
    seen = torch.arange(block.window, device=x.device) >= block.window - count
    scores = (q @ k.transpose(-1, -2) / math.sqrt(block.head_dim)).masked_fill(~seen, -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)[:, 0]
    return linear(block.out_proj, y), (kept, count)


def attention_first(block, batch, like):
    kept = like.new_zeros(batch, block.window, 2, block.heads, block.head_dim)
    return kept, torch.zeros((), dtype=torch.int64, device=like.device)


def recurrent_step(block, x, state):
    m = block.mixer
    weights = m.weight_ih_l0, m.weight_hh_l0, m.bias_ih_l0, m.bias_hh_l0
    if m.states == 2:
        h, c = torch.lstm_cell(x, state, *weights)
        return h, (h, c)
    h = torch.gru_cell(x, *state, *weights)
    return h, (h,)


def recurrent_first(block, batch, like):
    return tuple(like.new_zeros(batch, block.mixer.hidden_size) for _ in range(block.mixer.states))


PLAIN = {
    mlp.FeedForward: feed_forward,
    mamba.MambaBlock: mamba_layer,
    gated_ssm.GatedSSMBlock: gated_layer,
    attention.AttentionBlock: attention_layer,
    recurrent.RecurrentBlock: recurrent_layer,
}
STEPS = {
    mlp.FeedForward: lambda block, x, state: (feed_forward(block, x), state),
    mamba.MambaBlock: mamba_step,
    gated_ssm.GatedSSMBlock: gated_step,
    attention.AttentionBlock: attention_step,
    recurrent.RecurrentBlock: recurrent_step,
}
FIRST_STATES = {
    mlp.FeedForward: lambda block, batch, like: (),
    mamba.MambaBlock: mamba_first,
    gated_ssm.GatedSSMBlock: lambda block, batch, like: block.init_state(
        batch, {"dtype": like.dtype, "device": like.device}
    ),
    attention.AttentionBlock: attention_first,
    recurrent.RecurrentBlock: recurrent_first,
}

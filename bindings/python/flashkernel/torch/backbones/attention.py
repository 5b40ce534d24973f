"""Attention over a window of frames."""

import torch

import flashkernel as fk

from .._linear import Linear
from .backbone import Backbone, Block, is_known
from .mlp import FeedForward
from .norms import RMSNorm


def rotations(rows, head_dim, device=None):
    """(cosines, sines) by position, (rows, head_dim / 2) float32 each: pair k of a head turns by
    10000^(-2k / head_dim) a frame."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(rows, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 10000.0 ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


class AttentionBlock(Block):
    """Each frame attends to itself and the `window` - 1 before it, by rotary positions. `qk_norm`:
    an RMS norm on each head's queries and keys.

    The state keeps keys and values as they are before they are rotated, (B, rows, 2, heads,
    head_dim), and how many rows are filled. There is room for two windows: when it is full, the
    newest window - 1 frames move to the front. Attention sees the newest window of it, in order,
    and rotates keys by their place there: only differences of positions count, so a stream may go
    on for ever."""

    #: Rows of the tables that are kept; of longer sequences they are made as they come.
    table_rows = 1024

    def __init__(self, hidden, heads, head_dim, window, qk_norm, eps, made):
        super().__init__()
        if window < 1:
            raise fk.Error(f"Attention: window: expected 1 or more frames, got {window}")
        if head_dim % 2:
            raise fk.Error(f"Attention: head_dim: expected an even number, got {head_dim}")
        self.heads, self.head_dim, self.window = heads, head_dim, window
        self.lookback = window - 1
        self.qkv = Linear(hidden, 3 * heads * head_dim, bias=False, **made)
        self.q_norm = RMSNorm(head_dim, eps, **made) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, **made) if qk_norm else None
        self.out_proj = Linear(heads * head_dim, hidden, bias=False, **made)
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self._make_tables(made["device"])

    def _make_tables(self, device):
        self.cos, self.sin = rotations(self.table_rows, self.head_dim, device)

    def _apply(self, fn, recurse=True):
        """Makes the tables anew wherever the module moves: they stay float32 in a bfloat16 one."""
        super()._apply(fn, recurse)
        self._make_tables(self.cos.device)
        return self

    def _tables(self, rows):
        if is_known(rows) and rows <= self.table_rows:
            return self.cos, self.sin
        return rotations(rows, self.head_dim, self.cos.device)

    def _attend(self, q, k, v, **options):
        if self.q_norm is not None:
            q = self.q_norm(q)
        return fk.attention(q, k, v, rotary=self._tables(k.shape[1]), **options).flatten(-2)

    def forward(self, x, stream, norm, last=False):
        width, head = self.heads * self.head_dim, (self.heads, self.head_dim)
        if last:
            stream = stream[:, -1]
            if is_known(x.shape[1]):
                x = x[:, -self.window :]
            q = self.qkv.rows(x[:, -1:], 0, width).unflatten(-1, head)
            k, v = self.qkv.rows(x, width, 3 * width).unflatten(-1, (2, *head)).unbind(-3)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, *head)).unbind(-3)
        if self.k_norm is not None:
            k = self.k_norm(k)
        y = self._attend(q, k, v, causal=True, window=(self.window - 1, 0))
        return self.out_proj.add_norm(y[:, 0] if last else y, stream, norm)

    def step(self, x, stream, norm, state):
        kept, filled = state
        if filled == kept.shape[1]:
            kept[:, : self.window - 1] = kept[:, filled - self.window + 1 :]
            filled = self.window - 1
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim))
        new = kept.narrow(1, filled, 1)  # a compiler need not know which
        new.copy_(qkv[:, None, 1:])
        if self.k_norm is not None:
            new[:, :, 0] = self.k_norm(qkv[:, None, 1])
        filled += 1
        k, v = kept[:, max(0, filled - self.window) : filled].unbind(2)
        y = self._attend(qkv[:, :1], k, v)
        return *self.out_proj.add_norm(y[:, 0], stream, norm), (kept, filled)

    def init_state(self, batch, made):
        return torch.zeros(batch, 2 * self.window, 2, self.heads, self.head_dim, **made), 0


def attention_layer(hidden, heads, head_dim, window, qk_norm, feed_forward, eps, made) -> list:
    """Attention, and the feed-forward block behind it."""
    return [
        AttentionBlock(hidden, heads, head_dim, window, qk_norm, eps, made),
        FeedForward(hidden, feed_forward * hidden, made),
    ]


class Attention(Backbone):
    """Layers of attention over the last `window` frames and a GELU feed-forward network of
    `feed_forward` times `hidden` units: `heads` heads of `head_dim`, rotary positions, and on
    request a norm on queries and keys. It finds a frame anywhere in its window at once, and
    forgets what has left it.

    Published baseline: 40 ms."""

    def __init__(
        self,
        input_size=288,
        hidden=256,
        layers=2,
        *,
        heads=4,
        head_dim=64,
        window=60,
        qk_norm=False,
        feed_forward=4,
        norm="rms",
        eps=1e-5,
        device=None,
        dtype=None,
    ):
        made = {"device": device, "dtype": dtype}
        blocks = []
        for _ in range(layers):
            blocks += attention_layer(
                hidden, heads, head_dim, window, qk_norm, feed_forward, eps, made
            )
        super().__init__(blocks, input_size, hidden, norm, eps, device, dtype)

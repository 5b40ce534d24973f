"""What is measured: for each op its inputs, our call, the peers' calls, and the least it must do
(`counts`). A workload is written once, against an array namespace, for every framework and
device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import counts


@dataclass(frozen=True)
class Workload:
    """`inputs(params, rng)` gives float32 and integer NumPy arrays; floats are cast to the case's
    dtype, except those in `parameters`, which stay float32 in half precision too if asked. `ours`
    takes (fk, tensors) and each peer (module, tensors), module being torch, jax.numpy or numpy; of
    an op with options, both are made by functions of the case's params."""

    op: str
    inputs: Callable
    ours: Callable
    peers: dict[str, Callable]
    # (direction, params, bytes of an element) -> counts.Count
    count: Callable
    differentiable: tuple = ()
    products: bool = False  # matrix products: arithmetic is the limit
    options: bool = False
    errors: bool = True  # torch's formula is quick enough to compare with
    # Peers that are a loop in Python over the steps of a sequence: nobody would use them, so that
    # a ratio to one of them says little, and is none to a best peer. Where a compiler unrolls the
    # loop it is one, and is called so. Of an op with options a function of the case's params.
    loops: tuple | Callable = ()

    def bound(self, params: dict) -> "Workload":
        """The workload of one case."""
        if not self.options:
            return self
        peers = {name: make(params) for name, make in self.peers.items()}
        loops = self.loops(params) if callable(self.loops) else self.loops
        return replace(self, ours=self.ours(params), peers=peers, loops=loops)


class WithoutValues:
    """In place of a generator of random numbers, where nobody looks at what is drawn: arrays of
    normal numbers are zeros that take no memory."""

    def integers(self, *arguments):
        return np.random.default_rng(0).integers(*arguments)


def normal(rng, *shape):
    """Normal numbers; of many, the first four million again and again, which takes no time."""
    if isinstance(rng, WithoutValues):
        return np.broadcast_to(np.float32(0), shape)
    count = int(np.prod(shape))
    return np.resize(rng.standard_normal(min(count, 1 << 22), np.float32), shape)


def _rows(params, rng, *names, scale=1.0):
    shape = params["rows"], params["cols"]
    drawn = {n: normal(rng, *shape) for n in names}
    if isinstance(rng, WithoutValues):
        return drawn
    return {n: values * np.float32(scale) for n, values in drawn.items()}


def _norm_inputs(*vectors):
    def inputs(params, rng):
        out = _rows(params, rng, *(["x", "residual"] if params.get("residual") else ["x"]))
        for name in vectors:
            out[name] = normal(rng, params["cols"])
        return out

    return inputs


def _sum_and(norm):
    """A peer's residual add followed by its norm: what one fused call replaces."""

    def call(m, t):
        if "residual" not in t:
            return norm(m, t["x"], t)
        s = t["x"] + t["residual"]
        return norm(m, s, t), s

    return call


def _torch_rms(m, s, t):
    return m.nn.functional.rms_norm(s, (s.shape[-1],), t["weight"], 1e-6)


def _torch_layer(m, s, t):
    return m.nn.functional.layer_norm(s, (s.shape[-1],), t["weight"], t["bias"], 1e-5)


def _plain_rms(m, s, t):
    f = s.astype(m.float32)
    return (f / m.sqrt((f * f).mean(-1, keepdims=True) + 1e-6) * t["weight"]).astype(s.dtype)


def _plain_layer(m, s, t):
    f = s.astype(m.float32)
    f = f - f.mean(-1, keepdims=True)
    y = f / m.sqrt((f * f).mean(-1, keepdims=True) + 1e-5) * t["weight"] + t["bias"]
    return y.astype(s.dtype)


def _plain_logsumexp(m, x):
    top = x.max(-1, keepdims=True)
    return m.log(m.exp(x - top).sum(-1, keepdims=True)) + top


def _plain_cross_entropy(m, t):
    logits = t["logits"].astype(m.float32)
    lse = _plain_logsumexp(m, logits)[:, 0]
    return (lse - logits[m.arange(len(lse)), t["targets"]]).mean()


def _plain(function):
    return {"numpy": function, "jax": function}


def _rope_inputs(params, rng):
    b, length, h, d = (params[k] for k in "BLHD")
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)[None, :]
    return {
        "x": normal(rng, b, length, h, d),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
    }


def _rope(m, t):
    x, half = t["x"], t["x"].shape[-1] // 2
    cos, sin = t["cos"][None, :, None], t["sin"][None, :, None]
    a, b = x[..., :half], x[..., half:]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if m.__name__ == "torch":
        return m.cat(parts, -1).to(x.dtype)
    return m.concatenate(parts, -1).astype(x.dtype)


def _cross_entropy_inputs(params, rng):
    logits = _rows(params, rng, "logits", scale=3.0)
    return logits | {"targets": rng.integers(0, params["cols"], params["rows"])}


def _unary(name, ours, torch, plain, count):
    return Workload(
        name,
        lambda p, rng: _rows(p, rng, "x", scale=3.0),
        ours,
        {"torch": torch, **_plain(plain)},
        count,
        ("x",),
    )


def _norm_call(fk, name, t):
    arguments = {k: t[k] for k in ("weight", "bias", "residual") if k in t}
    return getattr(fk, name)(t["x"], **arguments)


# --- attention: (B, L, H, D), as our call takes it ------------------------------------------------


def _attention_inputs(params, rng):
    b, length, heads, d = (params[k] for k in "BLHD")
    kv = params.get("G", heads)
    sizes = {"q": (heads, d), "k": (kv, d), "v": (kv, params.get("E", d))}
    return {n: normal(rng, b, length, *size) for n, size in sizes.items()}


def _packed(params, tensors, torch):
    """The batch as packed sequences: for the varlen call."""
    b, length = params["B"], params["L"]
    offsets = torch.arange(0, b * length + 1, length, dtype=torch.int32, device=tensors["q"].device)
    return {n: t.flatten(0, 1) for n, t in tensors.items()}, offsets


def _attention(params):
    def call(fk, t):
        if not params.get("packed"):
            return fk.attention(t["q"], t["k"], t["v"], causal=params["causal"])
        import torch

        rows, offsets = _packed(params, t, torch)
        return fk.attention(
            **rows, causal=params["causal"], cu_seqlens_q=offsets, cu_seqlens_k=offsets
        )

    return call


def _dense(params):
    """Our own call without packing, as a peer."""
    call = _attention({**params, "packed": False})

    def dense(m, t):
        import flashkernel as fk

        return call(fk, t)

    return dense


def _widened(m, x):
    """An 8-bit tensor as bfloat16, made once: torch has no attention of its own for it."""
    if x.dtype != m.float8_e4m3fn:
        return x
    if not hasattr(x, "as_bfloat16"):
        x.as_bfloat16 = x.to(m.bfloat16)
    return x.as_bfloat16


def _sdpa(backend=None):
    """torch's scaled_dot_product_attention, by one of its backends."""

    def make(params):
        def call(m, t):
            q, k, v = (_widened(m, t[n]).transpose(1, 2) for n in "qkv")
            sdpa = m.nn.functional.scaled_dot_product_attention
            gqa = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
            if backend is None or q.dtype == m.float64:
                return sdpa(q, k, v, is_causal=params["causal"], **gqa).transpose(1, 2)
            with m.nn.attention.sdpa_kernel(getattr(m.nn.attention.SDPBackend, backend)):
                return sdpa(q, k, v, is_causal=params["causal"], **gqa).transpose(1, 2)

        return call

    return make


def _plain_attention(params):
    """Product, softmax, product: what a model does that knows no fused attention."""

    def call(m, t):
        q, k, v = (t[n].transpose(1, 2) for n in "qkv")
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if params["causal"]:
            length = s.shape[-1]
            seen = m.ones(length, length, dtype=m.bool, device=s.device).tril()
            s = s.masked_fill(~seen, float("-inf"))
        return (m.softmax(s, -1) @ v).transpose(1, 2)

    return call


WORKLOADS = {
    w.op: w
    for w in [
        Workload(
            "rms_norm",
            _norm_inputs("weight"),
            lambda fk, t: _norm_call(fk, "rms_norm", t),
            {"torch": _sum_and(_torch_rms), **_plain(_sum_and(_plain_rms))},
            counts.rms_norm,
            ("x", "residual", "weight"),
        ),
        Workload(
            "layer_norm",
            _norm_inputs("weight", "bias"),
            lambda fk, t: _norm_call(fk, "layer_norm", t),
            {"torch": _sum_and(_torch_layer), **_plain(_sum_and(_plain_layer))},
            counts.layer_norm,
            ("x", "residual", "weight", "bias"),
        ),
        _unary(
            "softmax",
            lambda fk, t: fk.softmax(t["x"]),
            lambda m, t: m.softmax(t["x"], -1),
            lambda m, t: m.exp(t["x"] - _plain_logsumexp(m, t["x"])),
            counts.softmax,
        ),
        _unary(
            "log_softmax",
            lambda fk, t: fk.log_softmax(t["x"]),
            lambda m, t: m.log_softmax(t["x"], -1),
            lambda m, t: t["x"] - _plain_logsumexp(m, t["x"]),
            counts.softmax,
        ),
        _unary(
            "logsumexp",
            lambda fk, t: fk.logsumexp(t["x"]),
            lambda m, t: m.logsumexp(t["x"], -1),
            lambda m, t: _plain_logsumexp(m, t["x"])[..., 0],
            counts.logsumexp,
        ),
        _unary(
            "sum",
            lambda fk, t: fk.sum(t["x"], -1),
            lambda m, t: m.sum(t["x"], -1),
            lambda m, t: m.sum(t["x"], -1),
            counts.sum,
        ),
        _unary(
            "max",
            lambda fk, t: fk.max(t["x"], -1),
            lambda m, t: m.amax(t["x"], -1),
            lambda m, t: m.max(t["x"], -1),
            counts.max,
        ),
        Workload(
            "cross_entropy",
            _cross_entropy_inputs,
            lambda fk, t: fk.cross_entropy(t["logits"], t["targets"]),
            {
                "torch": lambda m, t: m.nn.functional.cross_entropy(t["logits"], t["targets"]),
                **_plain(_plain_cross_entropy),
            },
            counts.cross_entropy,
            ("logits",),
        ),
        Workload(
            "rope",
            _rope_inputs,
            lambda fk, t: fk.rope(t["x"], t["cos"], t["sin"]),
            {"torch": _rope, **_plain(_rope)},
            counts.rope,
            ("x",),
        ),
        Workload(
            "attention",
            _attention_inputs,
            _attention,
            {
                "torch": _sdpa(),
                "cudnn": _sdpa("CUDNN_ATTENTION"),
                "flash": _sdpa("FLASH_ATTENTION"),
                "efficient": _sdpa("EFFICIENT_ATTENTION"),
                "plain": _plain_attention,
                "dense": _dense,
            },
            counts.attention,
            ("q", "k", "v"),
            products=True,
            options=True,
        ),
    ]
}

#: Inputs that stay float32 when the activations are half precision.
PARAMETERS = ("cos", "sin", "A", "D", "delta_bias", "dt_bias", "x_scale", "weight_scale")

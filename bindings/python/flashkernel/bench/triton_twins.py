"""The kernels that are written in Triton as peers of their twins in CUDA: `fk bench triton`."""

from .suites import Case

_CASES = (
    ("attention", {"B": 4, "L": 4096, "H": 16, "D": 64, "causal": True}),
    ("attention", {"B": 4, "L": 4096, "H": 16, "D": 128, "causal": False}),
    ("attention", {"B": 32, "L": 60, "H": 4, "D": 64, "causal": True}),
    ("linear", {"M": 4096, "K": 2048, "N": 8192}),
    ("linear", {"M": 4096, "K": 768, "N": 3072, "activation": "gelu_tanh"}),
    ("linear", {"M": 16, "K": 2048, "N": 8192}),
    ("selective_scan", {"B": 8, "L": 2048, "D": 2048, "N": 16}),
    ("selective_scan", {"B": 32, "L": 60, "D": 512, "N": 16}),
    ("ssd", {"B": 8, "L": 2048, "H": 24, "P": 64, "N": 128}),
    ("ssd", {"B": 32, "L": 60, "H": 16, "P": 64, "N": 16}),
)


def cases():
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for op, sizes in _CASES:
                params = tuple(sizes.items())
                yield Case(op, direction, dtype, params, ("triton",), "cuda", ("torch",))


def _attention(params):
    def call(m, t):
        from flashkernel import triton

        return triton.attention(t["q"], t["k"], t["v"], causal=params["causal"])

    return call


def _linear(params):
    def call(m, t):
        from flashkernel import triton

        return triton.linear(**t, activation=params.get("activation"))

    return call


def _selective_scan(params):
    def call(m, t):
        from flashkernel import triton

        return triton.selective_scan(**t, delta_softplus=True)

    return call


def _ssd(params):
    def call(m, t):
        from flashkernel import triton

        return triton.ssd(**t, dt_softplus=True)

    return call


#: By the op that each is a peer of.
TWINS = {
    "attention": _attention,
    "linear": _linear,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
}

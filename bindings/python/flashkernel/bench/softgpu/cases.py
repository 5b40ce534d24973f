"""What is counted: cases of the bench's ops that an interpreter runs in seconds, and that still
fill several tiles of each kernel. The suites have the names that their timed sisters have."""

from dataclasses import dataclass

from ..suites import NORMS, ROWWISE, Case

CHIPS = {75: "T4", 80: "A100", 90: "H200"}


@dataclass(frozen=True)
class Counted:
    case: Case
    architectures: tuple = tuple(CHIPS)
    quick: bool = False  # among those that every test run counts again


def _counted(op, direction, dtype, quick=False, architectures=tuple(CHIPS), **params):
    return Counted(Case(op, direction, dtype, tuple(params.items())), architectures, quick)


def rows():
    """Row-wise ops: rows that a warp, a block or several tiles of a block hold."""
    for direction in ("fwd", "bwd"):
        for op in NORMS:
            for dtype, r, c in (
                ("float32", 64, 768), ("bfloat16", 64, 768), ("bfloat16", 16, 8192),
            ):  # fmt: skip
                yield _counted(
                    op, direction, dtype, c == 768, rows=r, cols=c, residual=True
                )  # fmt: skip
        for op in ROWWISE[:-1]:
            if (op, direction) == ("sum", "bwd"):
                continue  # a view: nothing is launched
            for dtype in ("float32", "bfloat16"):
                quick = dtype == "bfloat16"
                yield _counted(op, direction, dtype, quick, rows=64, cols=1000)
            yield _counted(op, direction, "bfloat16", rows=4, cols=32000)
        for dtype in ("float32", "bfloat16"):
            quick = dtype == "bfloat16"
            yield _counted("cross_entropy", direction, dtype, quick, rows=16, cols=4099)
            yield _counted("rope", direction, dtype, quick, B=1, L=128, H=2, D=64)
        yield _counted("cross_entropy", direction, "bfloat16", rows=4, cols=32000)


def _attention(direction, dtype, b, length, heads, d, causal, quick=False, **params):
    architectures = params.pop("architectures", tuple(CHIPS))
    return _counted(
        "attention", direction, dtype, quick, architectures,
        B=b, L=length, H=heads, D=d, causal=causal, **params,
    )  # fmt: skip


def attention():
    """Attention, several tiles of queries and keys: dtypes, head sizes, masks, shared key heads,
    packed sequences."""
    for direction in ("fwd", "bwd"):
        for d in (64, 128):
            for causal in (False, True):
                for dtype in ("float16", "bfloat16"):
                    quick = (dtype, d) == ("float16", 64)
                    yield _attention(direction, dtype, 1, 512, 2, d, causal, quick)
                yield _attention(direction, "float32", 1, 256, 2, d, causal)
        for d in (96, 192, 256):
            yield _attention(direction, "float16", 1, 256, 2, d, True)
        yield _attention(direction, "float16", 1, 256, 2, 192, True, E=128)
        yield _attention(direction, "float16", 1, 256, 4, 64, True, G=1)
        yield _attention(direction, "float16", 2, 250, 2, 64, True, packed=True)
        yield _attention(direction, "float16", 1, 333, 2, 64, True)
    for d in (64, 128, 256):
        yield _attention("fwd", "float8_e4m3fn", 1, 512, 2, d, True, architectures=(90,))


def mamba():
    """The selective scan, forward and backward: a short sequence, one with many states, one that is
    cut into parts, and its convolution."""
    for direction in ("fwd", "bwd"):
        for dtype in ("float32", "bfloat16"):
            for b, length, d, n in ((1, 60, 256, 16), (2, 256, 128, 16), (1, 256, 64, 64)):
                quick = (length, dtype) == (60, "bfloat16")
                yield _counted(
                    "selective_scan", direction, dtype, quick, B=b, L=length, D=d, N=n
                )  # fmt: skip
        yield _counted("selective_scan", direction, "bfloat16", B=1, L=2048, D=32, N=16)


def ssd():
    """Mamba-2's scan: walks of many chunks, a sequence of few heads that is cut into walks, short
    ones that need one launch; gradients."""
    for dtype in ("float32", "float16", "bfloat16"):
        sizes = {"H": 8, "P": 64, "N": 128}
        quick = dtype == "float16"
        yield _counted("ssd", "fwd", dtype, B=1, L=480 if dtype == "float32" else 960, **sizes)
        yield _counted("ssd", "fwd", dtype, quick, B=1, L=2048, H=1, P=64, N=64)
        yield _counted("ssd", "fwd", dtype, quick, B=4, L=64, H=4, P=64, N=16)
        yield _counted("ssd", "bwd", dtype, B=1, L=480 if dtype == "float32" else 960, **sizes)
        yield _counted("ssd", "bwd", dtype, quick, B=4, L=64, H=4, P=64, N=16)


def conv1d():
    """Mamba's convolution with its SiLU."""
    for direction in ("fwd", "bwd"):
        for dtype in ("float32", "bfloat16"):
            quick = dtype == "bfloat16"
            yield _counted("causal_conv1d", direction, dtype, quick, B=2, L=256, D=128, W=4)
        yield _counted("causal_conv1d", direction, "bfloat16", B=1, L=1000, D=256, W=4)


def mamba_step():
    """One step of inference: the state and the convolution."""
    for dtype in ("float32", "bfloat16"):
        quick = dtype == "bfloat16"
        yield _counted("selective_state_update", "fwd", dtype, quick, B=2, D=1536, N=16)
        yield _counted("selective_state_update", "fwd", dtype, B=1, H=8, D=64, N=128)
        yield _counted("causal_conv1d_update", "fwd", dtype, quick, B=4, D=1536, W=4)


def linear():
    """Linear layers: a product alone, with what rides along, few rows, few tiles and a long K,
    backward, with a gate, with a model's loss behind it, and of 8-bit floats with their scales, one
    for each tensor or each block."""
    sizes = {"M": 256, "K": 256, "N": 512}
    for dtype in ("float32", "float16", "bfloat16"):
        yield _counted("linear", "fwd", dtype, dtype == "float16", **sizes)
    for dtype in ("float16", "bfloat16"):
        yield _counted(
            "linear", "fwd", dtype, **sizes, activation="gelu_tanh", bias=True, residual=True
        )
        yield _counted("linear", "fwd", dtype, M=1, K=1024, N=1024, bias=True)
        yield _counted("linear", "fwd", dtype, M=16, K=1024, N=1024, activation="silu", bias=True)
        yield _counted("linear", "fwd", dtype, M=64, K=4096, N=256)
        yield _counted("linear", "bwd", dtype, **sizes, activation="gelu_tanh", bias=True)
        for direction in ("fwd", "bwd"):
            quick = dtype == "float16"
            yield _counted("gated_linear", direction, dtype, quick, M=256, K=256, N=256)
            head = {"N": 64, "K": 256, "V": 2048}
            yield _counted("linear_cross_entropy", direction, dtype, quick, **head)
    float8 = "float8_e4m3fn"
    yield _counted("scaled_linear", "fwd", float8, **sizes)
    yield _counted("scaled_linear", "fwd", float8, True, **sizes, blocks=True)
    yield _counted("scaled_linear", "fwd", float8, M=16, K=1024, N=1024)


def _recurrent(op, direction, dtype, b, length, inputs, hidden, quick=False):
    sizes = {"B": b, "L": length, "I": inputs, "H": hidden}
    return _counted(op, direction, dtype, quick, **sizes)


def rnn():
    """A layer of LSTM or GRU: one block, several that meet after each step (a cluster on Hopper, a
    grid elsewhere), and more units than a block of a cluster keeps."""
    for op in ("lstm", "gru"):
        for direction in ("fwd", "bwd"):
            for dtype in ("float32", "float16"):
                quick = dtype == "float16"
                yield _recurrent(op, direction, dtype, 2, 6, 32, 48, quick)
                yield _recurrent(op, direction, dtype, 1, 6, 64, 256, quick)
            yield _recurrent(op, direction, "float16", 32, 4, 64, 256)
        yield _recurrent(op, "fwd", "float16", 1, 4, 64, 512)


_ALL = (rows, attention, mamba, ssd, conv1d, mamba_step, linear, rnn)
SUITES = {f.__name__: f for f in _ALL}


def full_size():
    """Calls that fill a GPU, of each launch a sample: what the page's estimates are of."""
    for direction in ("fwd", "bwd"):
        yield _counted("rms_norm", direction, "float16", rows=16384, cols=4096, residual=True)
        yield _counted("softmax", direction, "float16", rows=16384, cols=4096)
        yield _counted("cross_entropy", direction, "float16", rows=1024, cols=128256)
        yield _counted("rope", direction, "float16", B=2, L=4096, H=32, D=128)
        for d in (64, 128):
            yield _attention(direction, "float16", 4, 2048, 2048 // d, d, True)
        yield _counted("selective_scan", direction, "float16", B=2, L=2048, D=2048, N=16)
        yield _counted("causal_conv1d", direction, "float16", B=8, L=2048, D=2048, W=4)
    yield _attention("fwd", "float16", 4, 2048, 16, 128, False)
    yield _attention("fwd", "float32", 4, 1024, 16, 128, True)
    yield _counted("selective_state_update", "fwd", "float16", B=64, D=5120, N=16)
    sizes = {"K": 2048, "N": 8192, "activation": "gelu_tanh", "bias": True}
    yield _counted("linear", "fwd", "float16", M=4096, **sizes)
    yield _counted("linear", "fwd", "float16", M=1, **sizes)
    yield _counted("linear", "bwd", "float16", M=4096, **sizes)


#: Its rows have the counters of each launch, and are of a sample.
SAMPLED = full_size.__name__
SUITES[SAMPLED] = full_size

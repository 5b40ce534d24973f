"""Named lists of cases. A case is an op, a direction, its sizes and a dtype."""

from dataclasses import dataclass, replace

from .linear_cpu import HAS_OPENVINO


@dataclass(frozen=True)
class Case:
    op: str
    direction: str  # fwd, bwd
    dtype: str  # float32, float16, bfloat16, float8_e4m3fn
    params: tuple  # of (name, value)
    peers: tuple = ()  # instead of the framework's own
    device: str = ""  # the only one that it is for
    frameworks: tuple = ()  # the only ones that it is for
    runs: int = 0  # so many of ours, for the tail of their times; 0: as many as the others have

    @property
    def name(self) -> str:
        sizes = " x ".join(str(v) for k, v in self.params if not isinstance(v, bool))
        flags = "".join(f" + {k}" for k, v in self.params if v is True)
        return f"{self.op}_{self.direction} {sizes} {self.dtype}{flags}"


NORMS = ("rms_norm", "layer_norm")
ROWWISE = ("softmax", "log_softmax", "logsumexp", "sum", "max", "cross_entropy")


def _case(op, direction, dtype, **params):
    return Case(op, direction, dtype, tuple(params.items()))


def demo():
    """One case or two per op family, and the frames of a real-time agent: half a minute, with
    --quick a few seconds."""
    yield _case("rms_norm", "fwd", "float32", rows=4096, cols=768, residual=True)
    yield _case("layer_norm", "fwd", "float32", rows=4096, cols=768, residual=True)
    yield _case("softmax", "fwd", "float32", rows=4096, cols=768)
    yield _case("logsumexp", "fwd", "float32", rows=4096, cols=768)
    yield _case("cross_entropy", "fwd", "float32", rows=1024, cols=32000)
    yield _case("rope", "fwd", "float32", B=1, L=2048, H=8, D=64)
    # By these names no other framework finds them.
    yield _attention("fwd", "float32", ("torch_eager",), 1, 512, 8, 64, True)
    yield _scan("fwd", "float32", ("torch_eager",), 1, 256, 512, 16)
    from .agent_suite import frames

    yield from frames()


def rows():
    """Every row-wise op over small to large matrices, forward and backward, float32."""
    for op in (*NORMS, *ROWWISE):
        for direction in ("fwd", "bwd"):
            for r in (1, 16, 128, 4096):
                for c in (64, 768, 4096, 32000):
                    params = {"rows": r, "cols": c}
                    if op in NORMS:
                        params["residual"] = True
                    yield _case(op, direction, "float32", **params)
    for direction in ("fwd", "bwd"):
        yield _case("cross_entropy", direction, "float32", rows=1024, cols=32000)
        for b, length in ((1, 1), (1, 128), (4, 2048)):
            yield _case("rope", direction, "float32", B=b, L=length, H=8, D=64)


def bandwidth():
    """Sizes that fill a GPU, bfloat16: the share of the copy bandwidth that each op reaches."""
    for direction in ("fwd", "bwd"):
        for op in NORMS:
            for c in (768, 2048, 4096, 8192):
                sizes = {"rows": 16384, "cols": c, "residual": True}
                peers = ("torch_eager", "torch_compile", "torch_compile_dynamic")
                yield Case(op, direction, "bfloat16", tuple(sizes.items()), peers)
        for op in ROWWISE[:-1]:
            yield _case(op, direction, "bfloat16", rows=16384, cols=4096)
        yield _case("cross_entropy", direction, "bfloat16", rows=8192, cols=128256)
        yield _case("rope", direction, "bfloat16", B=8, L=4096, H=32, D=128)


def overhead():
    """What a call costs when there is next to nothing to compute."""
    for op in NORMS:
        yield _case(op, "fwd", "float32", rows=1, cols=64)
    yield _case("softmax", "fwd", "float32", rows=1, cols=64)


def _attention(direction, dtype, peers, b, length, heads, d, causal, **params):
    sizes = {"B": b, "L": length, "H": heads, "D": d, "causal": causal, **params}
    return Case("attention", direction, dtype, tuple(sizes.items()), peers)


def _forty_cells(peers):
    for d in (64, 128):
        for causal in (False, True):
            for direction in ("fwd", "bwd"):
                for length in (512, 1024, 2048, 4096, 8192):
                    yield _attention(
                        direction, "bfloat16", peers, 16384 // length, length, 2048 // d, d, causal
                    )


def attention():
    """Forty cells that fill a GPU: B * L = 16384, H * D = 2048, bfloat16."""
    return _forty_cells(("cudnn",))


def attention_portable():
    """The same cells beside PyTorch's flash backend, for the kernels of any GPU: with
    FK_IMPL=attention_fwd=cuda,attention_bwd=cuda."""
    return _forty_cells(("flash",))


def attention_more():
    """Shared key heads, packed sequences and the same unpacked, one sequence, float32, wide
    heads."""
    for direction in ("fwd", "bwd"):
        for causal in (False, True):
            for d in (64, 128):
                both = ("cudnn", "flash")
                heads = 2048 // d
                for b, length, extra in (
                    (4, 4096, {"G": heads // 8}),
                    (4, 4096, {"packed": True}),
                    (16, 1024, {"packed": True}),
                    (16, 1024, {}),
                ):
                    yield _attention(
                        direction, "bfloat16", both, b, length, heads, d, causal, **extra
                    )
                yield _attention(direction, "float32", ("efficient",), 4, 4096, heads, d, causal)
            yield _attention(direction, "bfloat16", both, 1, 4096, 16, 128, causal)
            for d in (96, 192, 256):
                yield _attention(direction, "bfloat16", both, 4, 4096, 8, d, causal)
            for length in (1024, 4096, 16384):
                yield _attention(
                    direction, "bfloat16", ("cudnn",), 16384 // length, length, 8, 192, causal,
                    E=128,
                )  # fmt: skip


def attention_float8():
    """8-bit floats, B * L = 16384, H * D = 2048, beside cuDNN on the same values in bfloat16."""
    for d in (64, 128, 256):
        for causal in (False, True):
            for length in (1024, 4096, 8192):
                yield _attention(
                    "fwd", "float8_e4m3fn", ("cudnn",), 16384 // length, length, 2048 // d, d,
                    causal,
                )  # fmt: skip


def attention_packed():
    """Packed sequences beside our own answer to the same batch unpacked: the forty cells."""
    for case in _forty_cells(("dense",)):
        yield replace(case, params=(*case.params, ("packed", True)))


def attention_long():
    """One long sequence, whose scores would be far larger than all else."""
    for direction in ("fwd", "bwd"):
        on_gpu = _attention(direction, "bfloat16", ("cudnn",), 1, 131072, 8, 128, True)
        on_cpu = _attention(direction, "float32", ("torch",), 1, 16384, 2, 64, True)
        yield replace(on_gpu, device="cuda")
        yield replace(on_cpu, device="cpu")


def attention_grid():
    """Latency and memory over lengths, head sizes, batches and precisions."""
    for dtype in ("float16", "float32"):
        for d in (64, 128):
            for causal in (False, True):
                for length in (512, 1024, 2048, 4096):
                    for b in (1, 4, 8):
                        peers = ("torch", "plain", "plain_compile")
                        yield _attention("fwd", dtype, peers, b, length, 8, d, causal)
                        yield _attention("bwd", dtype, ("torch",), b, length, 8, d, causal)


def attention_cpu():
    """What fits a CPU: long sequences, short ones, half precision."""
    for dtype in ("float32", "bfloat16", "float16"):
        for direction in ("fwd", "bwd"):
            for causal in (False, True):
                for b, length, heads in ((1, 512, 8), (1, 2048, 8), (32, 60, 4)):
                    yield _attention(direction, dtype, ("torch",), b, length, heads, 64, causal)


def _scan(direction, dtype, peers, b, length, d, n, **params):
    sizes = {"B": b, "L": length, "D": d, "N": n, **params}
    return Case("selective_scan", direction, dtype, tuple(sizes.items()), peers)


def mamba():
    """The selective scan, short and long, and its convolution, on a GPU."""
    shapes = (
        (1, 60, 1024, 16), (32, 60, 1024, 16), (8, 2048, 2048, 16), (1, 2048, 1536, 16),
        (8, 2048, 2048, 64), (1, 65536, 2048, 16),
    )  # fmt: skip
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for b, length, d, n in shapes:
                yield _scan(direction, dtype, ("none",), b, length, d, n)
        for b, length, d in ((8, 2048, 2048), (2, 16384, 5120)):
            sizes = {"B": b, "L": length, "D": d, "W": 4}
            yield Case("causal_conv1d", direction, "bfloat16", tuple(sizes.items()), ("none",))


def mamba_cpu():
    """The selective scan beside JAX's scans (by --framework jax, whose backward is timed with
    its forward)."""
    for b, length, d in ((32, 60, 512), (1, 2048, 1536)):
        for direction in ("fwd", "bwd"):
            peers = ("jax_lax_scan", "jax_associative_scan")
            yield _scan(direction, "float32", peers, b, length, d, 16)


def mamba_algorithms():
    """The selective scan by each of its algorithms."""
    for b, length, d in ((32, 60, 512), (1, 2048, 1536), (1, 16384, 16)):
        for name in ("sequential", "blelloch", "hillis_steele", "chunked", "cumsum"):
            yield _scan("fwd", "float32", ("none",), b, length, d, 16, algorithm=name)


def _agent(forward_peers, training_peers):
    """A game agent's backbone: forward at batch 1 and 32, training steps."""
    for b, length, train in (
        (1, 60, False), (32, 60, False), (32, 60, True), (32, 120, True), (32, 180, True),
    ):  # fmt: skip
        sizes = {"B": b, "L": length, "train": train}
        peers = training_peers if train else forward_peers
        yield Case("mamba_agent", "fwd", "float32", tuple(sizes.items()), peers)


def mamba_agent():
    """A game agent's backbone on a GPU, where plain JAX takes seconds to compile: training steps
    beside the faster of its scans."""
    return _agent(("none",), ("jax_associative_scan",))


def mamba_agent_cpu():
    """A game agent's backbone on a CPU."""
    return _agent(("jax_lax_scan", "jax_associative_scan"), ("jax_lax_scan",))


def mamba_jax():
    """The selective scan called from JAX beside JAX's own scans (by --framework jax, whose backward
    is timed with its forward)."""
    shapes = ((32, 60, 1024, 16), (1, 60, 512, 16), (1, 2048, 1536, 16), (8, 2048, 2048, 16))
    for direction in ("bwd", "fwd"):
        for b, length, d, n in shapes:
            # lax.scan takes thirty times as long where there are many steps.
            peers = ("jax_associative_scan", *(("jax_lax_scan",) if length < 2048 else ()))
            yield _scan(direction, "float32", peers, b, length, d, n)


def mamba2():
    """Mamba-2's scan, long and short, and on a CPU a small one in chunks of 16."""
    return [*_mamba2_cpu(), *_mamba2_cuda()]


def _mamba2_cpu():
    shapes = (
        {"B": 1, "L": 2048, "H": 24, "P": 64, "N": 128},
        {"B": 8, "L": 256, "H": 24, "P": 64, "N": 128},
        {"B": 1, "L": 180, "H": 8, "P": 64, "N": 64, "chunk": 16},
    )
    for direction in ("fwd", "bwd"):
        for dtype in ("float32", "bfloat16"):
            for shape in shapes:
                peers = ("transformers", "selective_scan")
                yield Case("ssd", direction, dtype, tuple(shape.items()), peers, "cpu")


def _mamba2_cuda():
    from .mamba2 import gpu_peers

    shapes = (
        {"B": 8, "L": 2048, "H": 80, "P": 64, "N": 128},
        {"B": 1, "L": 2048, "H": 32, "P": 64, "N": 128},
        {"B": 2, "L": 16384, "H": 80, "P": 64, "N": 128},
        {"B": 32, "L": 64, "H": 16, "P": 64, "N": 16, "chunk": 64},
    )
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for shape in shapes:
                yield Case("ssd", direction, dtype, tuple(shape.items()), gpu_peers(), "cuda")


def mamba_step():
    """One step of inference: the state and the convolution, small batches and large."""

    def step(op, dtype, **sizes):
        return Case(op, "fwd", dtype, tuple(sizes.items()), ("torch_eager",))

    for dtype in ("bfloat16", "float32"):
        for b, d in ((1, 1536), (1, 2048), (1, 5120), (64, 5120), (256, 5120)):
            yield step("selective_state_update", dtype, B=b, D=d, N=16)
        for b in (1, 64):
            yield step("selective_state_update", dtype, B=b, H=80, D=64, N=128)
            yield step("causal_conv1d_update", dtype, B=b, D=5120, W=4)


def conv1d():
    """Mamba's convolution with its SiLU."""
    for direction in ("fwd", "bwd"):
        for b, length, d in ((32, 60, 512), (1, 2048, 1536)):
            yield _case("causal_conv1d", direction, "float32", B=b, L=length, D=d, W=4)


def conv1d_large():
    """The same at sizes that a GPU's memory bounds."""
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for d in (2048, 4096):
                sizes = {"B": 8, "L": 2048, "D": d, "W": 4}
                yield Case(
                    "causal_conv1d", direction, dtype, tuple(sizes.items()), ("torch_eager",)
                )


def linear():
    """Linear layers of a few shapes, alone, with bias and GELU and with a gate, a language model's
    loss, and on a CPU packed weights."""
    return [*_linear_cpu(), *_linear_cuda()]


def _linear_cpu():
    shapes = (
        (1, 768, 3072), (16, 768, 3072), (60, 256, 1024), (512, 768, 3072), (2048, 768, 3072),
        (2048, 2048, 2048),
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for direction in ("fwd", "bwd"):
            for m, k, n in shapes:
                sizes = {"M": m, "K": k, "N": n}
                for extra in ({}, {"activation": "gelu_tanh"}):
                    params = tuple((sizes | extra).items())
                    both = direction == "fwd" and dtype == "float32" and HAS_OPENVINO
                    peers = ("torch_eager", *(("openvino",) if both else ()))
                    yield Case("linear", direction, dtype, params, peers, "cpu")
            for m in (1, 512):
                params = (("M", m), ("K", 768), ("N", 2048))
                yield Case("gated_linear", direction, dtype, params, ("torch_eager",), "cpu")
            yield _head(direction, dtype, "cpu")
    for dtype in ("float32", "bfloat16"):  # a weight in no cache
        params = (("M", 1), ("K", 4096), ("N", 16384))
        yield Case("linear", "fwd", dtype, params, ("torch_eager",), "cpu")
    for kept in ("float32", "bfloat16", "int8"):
        # The last weight is in no cache.
        for m, k, n in (*shapes[:2], shapes[3], (1, 4096, 16384)):
            params = (("M", m), ("K", k), ("N", n), ("activation", "gelu_tanh"), ("kept", kept))
            peers = ("torch_eager", "linear", *(("torch_int8",) if kept == "int8" else ()))
            peers += ("openvino",) if kept == "float32" and HAS_OPENVINO else ()
            yield Case("packed_linear", "fwd", "float32", params, peers, "cpu")


def _head(direction, dtype, device):
    """The loss of a small language model's head."""
    params = (("N", 4096), ("K", 768), ("V", 50257))
    # Torch's own in chunks makes the gradients in its forward.
    peers = ("torch_eager", *(("chunked",) if direction == "fwd" and device == "cpu" else ()))
    return Case("linear_cross_entropy", direction, dtype, params, peers, device)


def _linear_cuda():
    """The bar of a layer with bias and activation is the vendor's plain product."""
    few = ((1, 2048, 8192), (16, 2048, 8192), (64, 2048, 8192))
    many = ((512, 768, 3072), (512, 2048, 8192), (4096, 768, 3072), (16384, 768, 3072),
            (4096, 2048, 8192), (8192, 4096, 16384))  # fmt: skip
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for m, k, n in (*few, *many[: None if dtype == "bfloat16" else 3]):
                sizes = {"M": m, "K": k, "N": n}
                for extra in ({}, {"activation": "gelu_tanh"}):
                    params = tuple((sizes | extra).items())
                    plain = ("product",) if extra and direction == "fwd" else ()
                    yield Case("linear", direction, dtype, params, ("torch_eager", *plain), "cuda")
        for m, k, n in ((512, 768, 3072), (4096, 768, 3072), (4096, 2048, 8192)):
            params = (("M", m), ("K", k), ("N", n))
            yield Case("gated_linear", direction, "bfloat16", params, ("torch_eager",), "cuda")
        yield _head(direction, "bfloat16", "cuda")
    for m, k, n in ((16, 2048, 8192), (4096, 2048, 8192), (8192, 4096, 16384)):
        sizes = {"M": m, "K": k, "N": n}
        for extra, peers in (({}, ("torch_eager", "bfloat16")), ({"blocks": True}, ("bfloat16",))):
            params = tuple((sizes | extra).items())
            yield Case("scaled_linear", "fwd", "float8_e4m3fn", params, peers, "cuda")


def rnn():
    """A layer of LSTM and of GRU, forward and with its gradients, and one frame of two layers."""
    return [*_rnn_cpu(), *_rnn_cuda()]


def _rnn_cpu():
    from . import rnn as workloads

    shapes = ((1, 60, 256, 256), (32, 60, 256, 256), (1, 1024, 256, 256), (32, 60, 512, 512))
    for op in workloads.GATES:
        for train in (False, True):
            for shape in shapes:
                params = (*zip("BLIH", shape, strict=True), ("train", train))
                yield Case(op, "fwd", "float32", params, workloads.peers(train), "cpu")
    for op in workloads.GATES:
        sizes = {"B": 1, "H": 512, "layers": 2}
        yield Case(f"{op}_step", "fwd", "float32", tuple(sizes.items()), ("torch",), "cpu")


def _rnn_cuda():
    """Beside cuDNN, which torch takes."""
    shapes = ((1, 60, 512), (32, 60, 512), (32, 60, 256), (16, 256, 512), (64, 256, 1024),
              (1, 1024, 256), (128, 512, 512))  # fmt: skip
    for op in ("lstm", "gru"):
        for dtype in ("float32", "bfloat16"):
            for train in (False, True):
                for b, length, hidden in shapes:
                    sizes = {"B": b, "L": length, "I": hidden, "H": hidden, "train": train}
                    yield Case(op, "fwd", dtype, tuple(sizes.items()), ("torch",), "cuda")


def agent():
    """The backbones of a real-time agent: windows of 60 frames, single frames, training."""
    from .agent_suite import cases

    return [*cases("cpu"), *cases("cuda")]


def triton():
    """Every kernel that is written in Triton beside its twin in CUDA, on a GPU."""
    from .triton_twins import cases

    return cases()


_ALL = (
    demo, rows, bandwidth, overhead,
    attention, attention_portable, attention_more, attention_packed, attention_long,
    attention_float8, attention_grid, attention_cpu,
    mamba, mamba_cpu, mamba_algorithms, mamba_agent, mamba_agent_cpu, mamba_jax, mamba2, mamba_step,
    conv1d, conv1d_large, linear, rnn, agent, triton,
)  # fmt: skip
SUITES = {f.__name__: f for f in _ALL}

#: What a suite needs to be installed, beside a framework.
NEEDS = {"triton": "triton"}

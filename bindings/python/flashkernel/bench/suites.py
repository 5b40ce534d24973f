"""Named lists of cases. A case is an op, a direction, its sizes and a dtype."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    op: str
    direction: str  # fwd, bwd
    dtype: str  # float32, float16, bfloat16
    params: tuple  # of (name, value)

    @property
    def name(self) -> str:
        sizes = " x ".join(str(v) for k, v in self.params if k != "residual")
        residual = " + residual" if dict(self.params).get("residual") else ""
        return f"{self.op}_{self.direction} {sizes} {self.dtype}{residual}"


NORMS = ("rms_norm", "layer_norm")
ROWWISE = ("softmax", "log_softmax", "logsumexp", "sum", "max", "cross_entropy")


def _case(op, direction, dtype, **params):
    return Case(op, direction, dtype, tuple(params.items()))


def demo():
    """A few seconds: one case per op family."""
    yield _case("rms_norm", "fwd", "float32", rows=4096, cols=768, residual=True)
    yield _case("layer_norm", "fwd", "float32", rows=4096, cols=768, residual=True)
    yield _case("softmax", "fwd", "float32", rows=4096, cols=768)
    yield _case("logsumexp", "fwd", "float32", rows=4096, cols=768)
    yield _case("cross_entropy", "fwd", "float32", rows=1024, cols=32000)
    yield _case("rope", "fwd", "float32", B=1, L=2048, H=8, D=64)


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
                yield _case(op, direction, "bfloat16", rows=16384, cols=c, residual=True)
        for op in ROWWISE[:-1]:
            yield _case(op, direction, "bfloat16", rows=16384, cols=4096)
        yield _case("cross_entropy", direction, "bfloat16", rows=8192, cols=128256)
        yield _case("rope", direction, "bfloat16", B=8, L=4096, H=32, D=128)


def overhead():
    """What a call costs when there is next to nothing to compute."""
    for op in NORMS:
        yield _case(op, "fwd", "float32", rows=1, cols=64)
    yield _case("softmax", "fwd", "float32", rows=1, cols=64)


SUITES = {f.__name__: f for f in (demo, rows, bandwidth, overhead)}

"""Where the kernels run: on a GPU or, where there is none to test them on, in Triton's interpreter,
which TRITON_INTERPRET=1 asks for before Triton is imported."""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def takes(device) -> bool:
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def tuned(configurations, key, fitting=None):
    """Triton's autotuner. The interpreter has no clock: it takes the last, which has the least
    tiles."""
    if INTERPRETED:
        return triton.autotune(configurations[-1:], key=key)
    prune = {} if fitting is None else {"prune_configs_by": {"early_config_prune": fitting}}
    return triton.autotune(configurations, key=key, **prune)


# float32 products as three of tf32, which is all but exact; half precision is not touched by it.
_PRECISION = tl.constexpr("tf32x3")
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _factors(a, b):
    """The interpreter would multiply a bfloat16's bits as an integer: it gets float32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return a, b


@triton.jit
def dot(a, b):
    a, b = _factors(a, b)
    return tl.dot(a, b, input_precision=_PRECISION)


@triton.jit
def dot_add(a, b, total):
    a, b = _factors(a, b)
    return tl.dot(a, b, total, input_precision=_PRECISION)

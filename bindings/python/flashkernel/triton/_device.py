"""Where the kernels run: on a GPU or, where there is none to test them on, in Triton's interpreter,
which TRITON_INTERPRET=1 asks for before Triton is imported."""

import os

import triton

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

"""The workloads of Mamba-2: its scan beside Transformers' in torch, beside our own selective scan
of the same model, and on a GPU beside mamba-ssm's kernels where they are installed."""

import importlib.util

import numpy as np

from . import counts
from .workloads import Workload, normal

TRANSFORMERS_CHUNK = 256  # the chunks of the models' own configurations


def gpu_peers() -> tuple:
    """Those that are installed."""
    return ("mamba_ssm",) if importlib.util.find_spec("mamba_ssm") else ("selective_scan",)


def _inputs(params, rng):
    b, length, h, p, n = (params[k] for k in "BLHPN")
    return {
        "x": normal(rng, b, length, h, p),
        "dt": normal(rng, b, length, h),
        "A": -np.exp(normal(rng, h)),
        "B": normal(rng, b, length, 1, n),
        "C": normal(rng, b, length, 1, n),
        "D": normal(rng, h),
        "dt_bias": normal(rng, h),
    }


def _ours(params):
    chunk = params.get("chunk")

    def call(fk, t):
        return fk.ssd(**t, dt_softplus=True, chunk_size=chunk)

    return call


def _transformers(params):
    """The path of Transformers' Mamba-2 where no kernel is installed."""

    def call(m, t):
        from transformers.models.mamba2 import modeling_mamba2

        scan = modeling_mamba2.mamba2_chunk_scan
        rest = {k: t[k] for k in ("D", "dt_bias")}
        chunk = params.get("chunk", TRANSFORMERS_CHUNK)
        x, dt, A, B, C = (t[k] for k in ("x", "dt", "A", "B", "C"))
        return scan(x, dt, A, B, C, chunk_size=chunk, dt_softplus=True, **rest)

    return call


def _mamba_ssm(params):
    """mamba-ssm's Triton kernels, on a GPU."""

    def call(m, t):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        rest = {k: t[k] for k in ("D", "dt_bias")}
        chunk = params.get("chunk", TRANSFORMERS_CHUNK)
        x, dt, A, B, C = (t[k] for k in ("x", "dt", "A", "B", "C"))
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk, dt_softplus=True, **rest)

    return call


def _selective_scan(params):
    """Each head's channels as channels of their own: the same numbers."""

    def call(m, t):
        import flashkernel as fk

        x = t["x"]
        channels, n = x.shape[3], t["B"].shape[3]

        def wide(v):
            return v.repeat_interleave(channels, -1)

        A = wide(t["A"])[:, None].expand(-1, n)
        y = fk.selective_scan(
            x.flatten(2), wide(t["dt"]), A, t["B"], t["C"], wide(t["D"]),
            delta_bias=wide(t["dt_bias"]), delta_softplus=True,
        )  # fmt: skip
        return y.reshape(x.shape)

    return call


WORKLOADS = [
    Workload(
        "ssd",
        _inputs,
        _ours,
        {
            "transformers": _transformers,
            "selective_scan": _selective_scan,
            "mamba_ssm": _mamba_ssm,
        },
        counts.ssd,
        ("x", "dt", "A", "B", "C", "D", "dt_bias"),
        products=True,
        options=True,
        errors=False,
    ),
]

"""Other libraries' names and layouts over FlashKernel's ops, so that existing code changes one
import."""

import importlib


def __getattr__(name: str):
    if name in ("causal_conv1d", "flash_attn", "mamba_ssm"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

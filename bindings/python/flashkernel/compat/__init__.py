"""Other libraries' names and layouts over FlashKernel's ops, so that existing code changes one
import. What those libraries can do and these modules cannot raises `NotSupported`, which is a
`flashkernel.Error` and a `NotImplementedError`."""

import importlib

from ._errors import NotSupported

__all__ = ["NotSupported", "causal_conv1d", "flash_attn", "mamba_ssm"]


def __getattr__(name: str):
    if name in ("causal_conv1d", "flash_attn", "mamba_ssm"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

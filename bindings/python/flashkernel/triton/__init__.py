"""Attention written in Triton: the readable comparison to the kernels of `flashkernel.attention`.
Needs torch and triton, and a GPU to run on."""

from .attention import attention

__all__ = ["attention"]

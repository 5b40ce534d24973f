"""Attention and the selective scan written in Triton: the readable comparison to the kernels of
`flashkernel.attention` and `flashkernel.selective_scan`. Needs torch and triton, and a GPU to run
on."""

from .attention import attention
from .selective_scan import selective_scan

__all__ = ["attention", "selective_scan"]

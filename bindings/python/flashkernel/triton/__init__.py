"""Attention, the selective scan and Mamba-2's scan written in Triton: the readable comparison to
the kernels of `flashkernel.attention`, `flashkernel.selective_scan` and `flashkernel.ssd`. Needs
torch and triton, and a GPU to run on."""

from .attention import attention
from .selective_scan import selective_scan
from .ssd import ssd

__all__ = ["attention", "selective_scan", "ssd"]

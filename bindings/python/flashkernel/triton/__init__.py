"""Attention, the selective scan and linear layers written in Triton: the readable comparison to
the kernels of `flashkernel.attention`, `flashkernel.selective_scan` and `flashkernel.linear`. Needs
torch and triton, and a GPU to run on (or Triton's interpreter, where TRITON_INTERPRET=1 is set)."""

from .attention import attention
from .linear import linear
from .selective_scan import selective_scan

__all__ = ["attention", "linear", "selective_scan"]

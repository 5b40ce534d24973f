"""Without a GPU, Triton's kernels are run by its interpreter, which must be asked for before Triton
is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

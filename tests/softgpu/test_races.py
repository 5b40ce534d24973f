"""Kernels with tiles of their own on some chip, while every pair of accesses is watched."""

import os

import pytest
import torch

import flashkernel as fk
import software_gpu

pytestmark = pytest.mark.skipif(not software_gpu.ON, reason="FK_SOFTGPU_ARCH is not set")


@pytest.fixture(autouse=True)
def races_are_watched():
    seed = int(os.environ.get("FK_SOFTGPU_SEED", "0"))
    software_gpu.take_problems()
    software_gpu.schedule(seed, True)
    yield
    software_gpu.schedule(seed, os.environ.get("FK_SOFTGPU_RACES") == "1")


# Turing's small tiles of 256 columns have more warps than pieces of 16 queries: several make the
# same scores, of which one may store them.
@pytest.mark.parametrize("softcap", (0.0, 2.0))
@pytest.mark.parametrize("columns", (64, 128, 256))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_attention(dtype, columns, softcap):
    leaves = [torch.randn(1, 50, 2, columns).to(dtype).requires_grad_() for _ in range(3)]
    out = fk.attention(*leaves, causal=True, softcap=softcap)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert software_gpu.take_problems() == ""

"""Every instruction of every kernel is one that the software GPU knows."""

import pytest

import software_gpu

pytestmark = pytest.mark.skipif(not software_gpu.ON, reason="FK_SOFTGPU_ARCH is not set")


def test_every_kernel_is_decoded():
    kernels, problems = software_gpu.decode_all()
    assert problems == ""
    assert kernels > 300

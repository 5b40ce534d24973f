"""The implementation that a call is said to take (FK_LOG, result files) is the kernel that ran."""

import ctypes
import os

import pytest
import torch

import flashkernel as fk
import software_gpu
from flashkernel import _library

pytestmark = pytest.mark.skipif(
    os.environ.get("FK_SOFTGPU_ARCH") != "90", reason="the kernels are Hopper's"
)


def taken(op: str, function, *arguments, **options) -> tuple[str, str]:
    """The implementation that the op's last call took, and the last kernel that it launched."""
    with software_gpu.launches() as made:
        function(*arguments, **options)
    last = _library.function("fk_op_last_implementation", ctypes.c_char_p, ctypes.c_void_p)
    return last(_library.find_op(op.encode())).decode(), made[-1]["name"]


def tensors(dtype, begin=0, columns=64):
    """q, k and v of which the first begins at element `begin` of its memory."""
    q = torch.randn(64 * columns + begin).to(dtype)[begin:].view(1, 64, 1, columns)
    return q, *(torch.randn(1, 64, 1, columns).to(dtype) for _ in range(2))


@pytest.mark.parametrize(
    "dtype, begin, options, implementation, kernel",
    [
        (torch.bfloat16, 0, {}, "cuda_sm90", "attention_forward"),
        (torch.bfloat16, 1, {}, "cuda", "attention::forward<"),
        (torch.float16, 0, {"softcap": 2.0}, "cuda_sm90", "attention_forward"),
        (torch.float32, 0, {}, "cuda_sm90_float32", "forward_float"),
        (torch.float32, 1, {}, "cuda", "attention::forward<"),
        (torch.float32, 0, {"softcap": 2.0}, "cuda", "attention::forward<"),
    ],
)
def test_attention(dtype, begin, options, implementation, kernel):
    name, last = taken("attention_fwd", fk.attention, *tensors(dtype, begin), **options)
    assert name == implementation
    assert kernel in last


@pytest.mark.parametrize(
    "dtype, channels, implementation, kernel",
    [(torch.bfloat16, 1064, "cuda_sm90", "scan_chunks"), (torch.float32, 24, "cuda", "scan_few")],
)
def test_selective_scan(dtype, channels, implementation, kernel):
    u, delta = (torch.rand(1, 300, channels).to(dtype) for _ in range(2))
    A, B, C = -torch.rand(channels, 16), *(torch.randn(1, 300, 16).to(dtype) for _ in range(2))
    name, last = taken("selective_scan_fwd", fk.selective_scan, u, delta, A, B, C)
    assert name == implementation
    assert kernel in last

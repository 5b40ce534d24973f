"""torch's CPU tensors on the software GPU: what passes for what."""

import pytest
import torch

import flashkernel as fk
import software_gpu

pytestmark = pytest.mark.skipif(not software_gpu.ON, reason="FK_SOFTGPU_ARCH is not set")


def test_a_call_on_cpu_tensors_runs_a_kernel():
    x = torch.randn(4, 100)
    with software_gpu.launches() as made:
        y = fk.softmax(x)
    assert len(made) == 1 and "softmax" in made[0]["kernel"].lower()
    assert made[0]["counters"]["warp_instructions"] > 0
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert software_gpu.take_problems() == ""


def test_so_does_the_backward():
    x = torch.randn(4, 100, requires_grad=True)
    y = fk.softmax(x)
    with software_gpu.launches() as made:
        (gradient,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert len(made) == 1
    expected = torch.autograd.grad(torch.softmax(x, -1)[:, 0].sum(), x)[0]
    torch.testing.assert_close(gradient, expected)


def test_where_it_is_absent_the_cpu_computes():
    with software_gpu.launches() as made, software_gpu.absent():
        fk.softmax(torch.randn(4, 100))
    assert made == []


def test_counters_are_the_same_every_time():
    x = torch.randn(3, 1000).half()
    counted = []
    for _ in range(2):
        with software_gpu.launches() as made:
            fk.rms_norm(x, torch.ones(1000))
        counted.append(made)
    assert counted[0] == counted[1] != []


def test_nothing_stays_allocated():
    fk.cross_entropy(torch.randn(4, 50), torch.tensor([1, 2, 3, 4]))
    assert software_gpu.allocations() == ""

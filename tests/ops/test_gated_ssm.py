"""gated_ssm against its formula in plain torch, on every backend."""

import pytest
import torch

import flashkernel as fk
from harness import (
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    check_finite_differences,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
)


def formula(x, dt, B, C):
    g = torch.sigmoid(dt.mean(-1, keepdim=True))
    s = torch.sigmoid((B * C).sum(-1, keepdim=True))
    u = g * s * x
    decay = 0.9 ** torch.arange(x.shape[1] - 1, -1, -1, dtype=torch.float64)
    w = (decay / decay.sum()).to(x.dtype)[:, None]
    return u + (1 - g) * u * w


def gated_case(b, length, d, n):
    def inputs(generator):
        return {
            "x": normal(generator, b, length, d),
            "dt": normal(generator, b, length, d),
            "B": normal(generator, b, length, n),
            "C": normal(generator, b, length, n),
        }

    return Case(
        f"gated-{b}x{length}x{d}x{n}",
        "gated_ssm",
        inputs,
        formula,
        differentiable=("x", "dt", "B", "C"),
        gradient_floor=1e-6,
    )


CASES = [gated_case(2, 33, 17, 8), gated_case(1, 1, 5, 1), gated_case(3, 70, 64, 16)]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend):
    run_forward(CASES[0], backend, "float32", layout)
    run_gradients(CASES[0], backend, "float32", layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_finite_differences(backend):
    check_finite_differences(CASES[0], backend)


def test_errors_name_the_argument():
    x = torch.ones(2, 3, 4)
    with raises("gated_ssm: C: expected shape .2, 3, 5. to fit"):
        fk.gated_ssm(x, x, torch.ones(2, 3, 5), torch.ones(2, 3, 6))
    with raises("gated_ssm: dt: expected float32, the dtype of x, got bfloat16"):
        fk.gated_ssm(x, x.bfloat16(), torch.ones(2, 3, 5), torch.ones(2, 3, 5))

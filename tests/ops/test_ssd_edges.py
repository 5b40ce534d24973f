"""ssd where there is nothing to compute, and where a state is forgotten at once."""

import pytest
import torch

import flashkernel as fk
from harness import BACKENDS, TORCH_BACKENDS, as_tuple, convert, normal, seeded, to_float64
from test_ssd import ssd_case


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    for b, length, h in ((0, 5, 2), (2, 0, 2), (2, 5, 0)):
        case = ssd_case(b=b, length=length, h=h, initial=True)
        tensors = {k: t.float() for k, t in case.inputs(seeded("empty")).items()}
        moved = {k: convert(t, backend) for k, t in tensors.items()}
        y, last = as_tuple(fk.ssd(**moved, return_final_state=True))
        assert tuple(y.shape) == (b, length, h, 8)
        if length == 0:
            assert (to_float64(last) == to_float64(tensors["initial_state"])).all()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradients_of_nothing(backend):
    """Of no steps, sums over them are 0 and the state's gradient passes through."""
    case = ssd_case(b=2, length=0, h=2, initial=True)
    tensors = {k: t.float() for k, t in case.inputs(seeded("nothing")).items()}
    leaves = {k: convert(t, backend).requires_grad_() for k, t in tensors.items()}
    _, last = fk.ssd(**leaves, return_final_state=True)
    gradients = dict(
        zip(leaves, torch.autograd.grad(last.sum(), list(leaves.values())), strict=True)
    )
    assert (gradients.pop("initial_state") == 1).all()
    assert all((g == 0).all() for g in gradients.values())


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_without_heads(dtype, backend):
    """Of no heads, with sizes that the kernels for whole vectors take."""
    x = convert(torch.zeros(2, 70, 0, 64, dtype=dtype), backend).requires_grad_()
    dt, A = (convert(torch.zeros(s), backend) for s in ((2, 70, 0), (0,)))
    B = convert(torch.randn(2, 70, 1, 16).to(dtype), backend).requires_grad_()
    y = fk.ssd(x, dt.to(dtype), A, B, B)
    dx, dB = torch.autograd.grad(y, (x, B), torch.ones_like(y))
    assert dx.shape == x.shape
    assert (dB == 0).all()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_slow_decays_behind_a_reset(dtype, backend):
    """A step of a huge dt forgets the state; decays of the steps behind it keep their digits."""
    generator = seeded("reset")
    length, reset = 64, 5
    x = normal(generator, 1, length, 1, 64).to(dtype)
    x[:, : reset + 1] = 0
    B, C = (normal(generator, 1, length, 1, 16).to(dtype) for _ in "BC")
    dt = torch.full((1, length, 1), 0.125).to(dtype)
    dt[:, reset] = 2.0**17
    A = torch.tensor([-1.0])
    given = (convert(t, backend) for t in (x, dt, A, B, C))
    ours = to_float64(fk.ssd(*given))
    state, exact = torch.zeros(64, 16, dtype=torch.float64), []
    for t in range(length):
        step = dt[0, t, 0].double()
        state = state * torch.exp(-step) + step * torch.outer(
            x[0, t, 0].double(), B[0, t, 0].double()
        )
        exact.append(state @ C[0, t, 0].double())
    exact = torch.stack(exact)[None, :, None]
    error = (ours - exact).abs().max() / exact.abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 6e-3)

"""What the tests of the torch binding share: every op by its declaration, with inputs for it, and
what they do with its outputs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import sampling

OPS = [pytest.param(op, id=op.public_name) for op in sampling.OPS]
CASES = [
    pytest.param(
        op,
        optionals,
        attributes,
        id="-".join([op.public_name, name, *map(str, attributes.values())]),
    )
    for op in sampling.OPS
    for optionals, name in ((False, "required"), (True, "all"))
    if not optionals or any(f.optional for f in op.inputs)
    for attributes in sampling.conditions(op)
]
EVERY_OP = pytest.mark.parametrize("op", OPS)
DIFFERENTIABLE = pytest.mark.parametrize("op", [p for p in OPS if p.values[0].backward])
EVERY_CASE = pytest.mark.parametrize(("op", "optionals", "attributes"), CASES)
DIFFERENTIABLE_CASE = pytest.mark.parametrize(
    ("op", "optionals", "attributes"), [p for p in CASES if p.values[0].backward]
)

call = sampling.call
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch(sample: dict, dtype=torch.float32, requires_grad=(), float32=()) -> dict:
    """`float32` names the inputs that are never in another dtype."""
    result = {}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy())
            if value.is_floating_point() and name not in float32:
                value = value.to(dtype)
            value.requires_grad_(name in requires_grad)
        result[name] = value
    return result


def outputs_of(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def loss_of(result, seed=0):
    """A scalar that weighs every output differently at every place."""
    generator = torch.Generator().manual_seed(seed)
    return sum(
        (o.float() * torch.randn(o.shape, generator=generator).to(o.device)).sum()
        for o in outputs_of(result)
    )


def with_gradient(op, sample):
    return [n for n in sampling.differentiable(op) if sample[n] is not None]


def same_values(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def strided(t):
    """The same values with gaps between them, or in another order of dimensions."""
    if t is None or not isinstance(t, torch.Tensor) or t.ndim == 0:
        return t
    wide = torch.full((*t.shape, 2), 7, dtype=t.dtype)
    wide[..., 0] = t
    return (
        wide[..., 0].transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 2 else wide[..., 0]
    )

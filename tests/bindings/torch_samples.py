"""What the tests of the torch binding share: every op by its declaration, with inputs for it, and
what they do with its outputs."""

import contextlib

import numpy as np
import pytest
import torch

import flashkernel as fk
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
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
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


def tensor_function(op, sample):
    """f(*tensors) for the tensors of a sample, and their names."""
    names = [f.name for f in op.inputs if sample[f.name] is not None]
    rest = {k: v for k, v in sample.items() if k not in names}
    public = getattr(fk, op.public_name)
    # Settled outside of what torch.compile traces.
    positional, keywords = sampling.split(op, {f.name: f.name for f in op.arguments})
    grouped = {k: v for k, v in keywords.items() if isinstance(v, tuple)}
    single = [k for k in keywords if k not in grouped]
    absent = {k for k, v in grouped.items() if all(sample[n] is None for n in v)}

    def function(*tensors):
        values = {**rest, **dict(zip(names, tensors, strict=True))}
        given = {n: values[n] for n in single}
        for name, members in grouped.items():
            given[name] = None if name in absent else tuple(values[n] for n in members)
        return public(*[values[n] for n in positional], **given)

    return function, names


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


@contextlib.contextmanager
def cuda_autocast(dtype):
    """That of a GPU which need not be there: torch.autocast itself would be off without one."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)


def on_a_gpu(t):
    """A fake tensor like it."""
    return torch.empty(t.shape, dtype=t.dtype, device="cuda")

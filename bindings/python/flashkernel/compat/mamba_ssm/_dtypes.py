"""The dtypes of what mamba-ssm's functions take, which may differ."""

import functools

import torch


def of_one_dtype(*tensors):
    """The tensors, some of which may be None, in the widest of their dtypes."""
    widest = functools.reduce(torch.promote_types, [t.dtype for t in tensors if t is not None])
    return [t if t is None else t.to(widest) for t in tensors]

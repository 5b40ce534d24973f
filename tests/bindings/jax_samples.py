"""What the tests of the JAX binding share: calls of any op, from its declaration."""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np

import sampling
from flashkernel._declarations import PUBLIC, Op

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclasses.dataclass
class Case:
    op: Op
    optionals: bool  # give the optional inputs
    attributes: dict
    settled: dict = dataclasses.field(default_factory=dict)  # with those that were drawn

    def __str__(self):
        settings = "".join(f"-{k}={v}" for k, v in self.attributes.items())
        return f"{self.op.public_name}-{'all' if self.optionals else 'least'}{settings}"

    def inputs(self, dtype="float32") -> dict:
        """NumPy arrays by name; settles the attributes as well."""
        seed = zlib.crc32(str(self).encode())
        sample = sampling.draw(self.op, seed, optionals=self.optionals, attributes=self.attributes)
        inputs = {}
        for f in self.op.inputs:
            if sample[f.name] is not None:
                kind = {"T": dtype, "I": "int32"}.get(f.dtype_rule, sample[f.name].dtype)
                inputs[f.name] = sample[f.name].astype(jnp.dtype(kind))
        self.settled = {f.name: sample[f.name] for f in self.op.attributes}
        return inputs


def fk_numpy(case: Case, inputs: dict) -> tuple:
    return sampling.call_with_state(case.op, inputs | case.settled)


def fk_jax(case: Case):
    """The op as a function of the arrays in `inputs`, by position."""

    def function(names, *arrays):
        inputs = dict(zip(names, arrays, strict=True))
        return as_tuple(sampling.call(case.op, inputs | case.settled))

    return function


def as_tuple(outputs) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def cases() -> list[Case]:
    """Every choice, flag and way to count the axis, with and without the optional inputs."""
    found = []
    for op in PUBLIC.values():
        values = {}
        for f in op.attributes:
            if f.kind == "choice":
                values[f.name] = [c or None for c in f.choices]
            elif f.kind == "boolean":
                values[f.name] = [False, True]
            elif f.kind == "axis":
                values[f.name] = [-1, 0] + ([None] if f.nullable else [])
        has_optional = any(f.optional for f in op.inputs)
        for optionals in [False, True] if has_optional else [False]:
            for setting in itertools.product(*values.values()):
                # Of an op with many flags, at most one is not as by default.
                flags = [n for n in values if op.by_name[n].kind == "boolean"]
                named = dict(zip(values, setting, strict=True))
                if len(flags) > 3 and sum(named[n] for n in flags) > 1:
                    continue
                # Of one with many choices, those by default meet all flags, the others none.
                many = [n for n in values if len(op.by_name[n].choices) > 3]
                rare = any(named[n] != op.by_name[n].python_default for n in many)
                if rare and (optionals or any(named[n] for n in flags)):
                    continue
                found.append(Case(op, optionals, named))
    return found


CASES = cases()
DIFFERENTIABLE = [c for c in CASES if c.op.backward]


def differentiable_inputs(case: Case, inputs: dict) -> list[int]:
    """Positions of the inputs that the op has a gradient for."""
    return [i for i, name in enumerate(inputs) if name in sampling.differentiable(case.op)]


def assert_close(actual, expected, dtype, what=""):
    """What is expected comes from the CPU; a GPU may add up in another order. Where large numbers
    cancel, what is left is as exact as they are."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    tolerance = 32 * EPSILON[dtype]
    finite = np.asarray(expected, np.float64)[np.isfinite(np.asarray(expected, np.float64))]
    largest = max(1.0, np.abs(finite).max(initial=0.0))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=tolerance,
        atol=tolerance * largest,
        err_msg=what,
    )

"""Random arguments for any op, drawn from its declaration alone, as NumPy arrays and Python values.
What a declaration cannot say (rope's R is at most D / 2) is learnt by asking the op, and drawing
again if it refuses. A new op is covered by being declared."""

import numpy as np

import flashkernel as fk
from flashkernel import _numpy
from flashkernel._declarations import PUBLIC, Field, Op, move_back

SIZES = (1, 2, 3, 4, 5, 8, 13)
ATTEMPTS = 200

#: Every op users call, in the order of declaration.
OPS: list[Op] = list(PUBLIC.values())


def draw(
    op: Op, seed: int, *, optionals: bool | None = None, attributes: dict | None = None
) -> dict:
    """Arguments by name, float32 and int64. optionals: whether to give the optional inputs (None:
    drawn too). attributes: fixed values, as users spell them; axis is drawn but never None."""
    random = np.random.default_rng([seed, *op.name.encode()])
    for _ in range(ATTEMPTS):
        sample = _draw_once(op, random, optionals, attributes or {})
        try:
            getattr(_numpy, op.public_name)(*sample.values(), *(False for _ in op.extra_keywords))
        except fk.Error:
            continue
        return sample
    raise AssertionError(f"{op.public_name} refused {ATTEMPTS} random calls")


def _draw_once(op: Op, random, optionals, attributes) -> dict:
    sizes: dict[str, int] = {}
    leading = tuple(int(n) for n in random.choice(SIZES, random.integers(0, 3)))

    def shape_of(f: Field) -> tuple:
        dims = f.shapes[random.integers(len(f.shapes))]
        shape = []
        for dim in dims:
            symbol = dim.rstrip("0123456789").rstrip("+-") if not dim.isdigit() else None
            if dim == "...":
                shape += leading
            elif symbol is None:
                shape.append(int(dim))
            else:
                size = sizes.setdefault(symbol, int(random.choice(SIZES)))
                shape.append(size + int(dim.removeprefix(symbol) or 0))
        return tuple(shape)

    sample = {}
    indices = []
    for f in op.arguments:
        if f.kind != "input":
            sample[f.name] = attributes.get(f.name, _attribute(f, random))
            continue
        if f.optional and (not optionals if optionals is not None else random.random() < 0.5):
            sample[f.name] = None
            continue
        shape = shape_of(f)
        if f.dtype_rule in "IJ":
            indices.append((f, shape))
            sample[f.name] = None  # when every size is known
        else:
            sample[f.name] = random.standard_normal(shape).astype(np.float32)
    for f, shape in indices:
        dtype = np.int64 if f.dtype_rule == "I" else np.int32
        limit = sizes.setdefault(f.below, 1) if f.below else 1
        sample[f.name] = random.integers(0, limit, shape).astype(dtype)
    if op.axis:
        along = [f for f in op.inputs if f.along_axis and sample[f.name] is not None]
        ndim = sample[along[0].name].ndim
        axis = attributes.get(op.axis.name, int(random.integers(-ndim, ndim)))
        sample[op.axis.name] = axis
        for f in along if axis is not None else ():
            value = sample[f.name]
            sample[f.name] = value.reshape(move_back(value.shape, axis))
    return sample


def _attribute(f: Field, random):
    if f.kind == "number":
        return f.default + (0.25 if random.random() < 0.3 else 0.0)
    if f.kind == "boolean":
        return bool(random.integers(2))
    if f.kind == "choice":
        return f.choices[random.integers(len(f.choices))] or None
    return f.default


def split(op: Op, sample: dict) -> tuple[list, dict]:
    """A sample as the public call takes it: positional and keyword arguments."""
    positional = [sample[f.name] for f in op.arguments if not f.keyword_only]
    keywords = {f.name: sample[f.name] for f in op.arguments if f.keyword_only}
    return positional, keywords


def differentiable(op: Op) -> list[str]:
    """The inputs an op has gradients for."""
    names = set()
    for f in op.backward.outputs if op.backward else ():
        names |= {f.name[1:], f.also_gradient_of}
    return [f.name for f in op.inputs if f.name in names]


def conditions(op: Op) -> list[dict]:
    """Attributes that, between them, lead to every set of outputs (the choices of a reduction)."""
    cases = [{}]
    for f in op.attributes:
        if any(o.when.partition("=")[0].rstrip("!") == f.name for o in op.outputs if o.when):
            values = f.choices if f.kind == "choice" else (False, True)
            cases = [{**case, f.name: value} for case in cases for value in values]
    return cases

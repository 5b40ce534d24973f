"""Random arguments for any op, drawn from its declaration alone, as NumPy arrays and Python values.
What a declaration cannot say (rope's R is at most D / 2) is learnt by asking the op, and drawing
again if it refuses. A new op is covered by being declared."""

import numpy as np

import flashkernel as fk
from flashkernel._declarations import PUBLIC, Field, Op
from flashkernel._shapes import move_back

SIZES = (1, 2, 3, 4, 5, 8, 13)
ATTEMPTS = 3000

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
            call(op, sample)
        except fk.Error:
            continue
        return sample
    raise AssertionError(f"{op.public_name} refused {ATTEMPTS} random calls")


def _draw_once(op: Op, random, optionals, attributes) -> dict:
    sizes: dict[str, int] = {}
    leading = tuple(int(n) for n in random.choice(SIZES, random.integers(0, 3)))
    form = int(random.integers(1024))  # tensors of one form take alternatives of one number
    packed = op.size_unless_given and random.random() < 0.3
    for symbol, other in op.size_unless_given.items():
        sizes[other] = 1 if packed else int(random.choice(SIZES))
        if not packed:
            sizes[symbol] = sizes[other]

    def shape_of(f: Field) -> tuple:
        number = int(random.integers(1024)) if f.form == f.name else form
        shape = []
        for dim in f.shapes[number % len(f.shapes)]:
            if dim.symbol == "...":
                shape += leading
            elif dim.or_one:
                repeated = random.random() < 0.3
                shape.append(1 if repeated else dim.evaluate(sizes.get(dim.symbol, 1), {}))
            else:
                size = dim.symbol and sizes.setdefault(dim.symbol, int(random.choice(SIZES)))
                shape.append(dim.evaluate(size, {}))
        return tuple(shape)

    sample = {}
    indices = []
    previous = op.arguments[0]
    for f in op.arguments:
        if f.kind != "input":
            sample[f.name] = attributes.get(f.name, _attribute(f, random))
            continue
        if f.rises_to:  # there if something is packed
            packed_dims = op.inputs[0].shapes[form % len(op.inputs[0].shapes)]
            given = f.rises_to in {d.symbol for d in packed_dims}
            if op.size_unless_given:
                given = packed
        elif f.group and previous.group == f.group:
            given = sample[previous.name] is not None
        else:
            given = random.random() < 0.5 if optionals is None else optionals
        previous = f
        if f.optional and (not given or f.with_float8):  # activations are float32 here
            sample[f.name] = None
            continue
        shape = shape_of(f)
        if f.dtype_rule in "IJ":
            indices.append((f, shape))
            sample[f.name] = None  # when every size is known
        else:
            values = random.standard_normal(shape)
            if f.drawn_between:
                values = random.uniform(*f.drawn_between, shape)
            sample[f.name] = values.astype(np.float32)
    if "norm" in sample:  # behind the op: a layer norm has a weight, and it alone a bias
        if sample["norm"] != "layer":
            sample["norm_bias"] = None
        elif sample["norm_weight"] is None:
            shape = shape_of(op.by_name["norm_weight"])
            sample["norm_weight"] = random.standard_normal(shape).astype(np.float32)
    for f in op.inputs:
        if f.factors_unless and sample[f.factors_unless] is not None:
            sample[f.name] = sample[f.name][tuple(slice(sizes[d.symbol]) for d in f.shapes[0])]
    for f, shape in indices:
        dtype = np.int64 if f.dtype_rule == "I" else np.int32
        limit = sizes.setdefault(f.below, 1) if f.below else 1
        sample[f.name] = random.integers(0, limit, shape).astype(dtype)
        if f.rises_to:
            inner = np.sort(random.integers(0, sizes[f.rises_to] + 1, shape[0] - 2))
            sample[f.name] = np.array([0, *inner, sizes[f.rises_to]], dtype)
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
    if f.kind == "number" and f.nullable:
        return 0.25 if random.random() < 0.3 else None
    if f.kind == "number":
        changed = 0.25 if f.may_be_infinite else f.default + 0.25
        return changed if random.random() < 0.3 else f.default
    if f.kind == "boolean":
        return bool(random.integers(2))
    if f.kind == "choice":
        return f.choices[random.integers(len(f.choices))] or None
    return f.default


def split(op: Op, sample: dict) -> tuple[list, dict]:
    """A sample as the public call takes it: positional and keyword arguments."""
    positional = [sample[f.name] for f in op.arguments if not f.keyword_only]
    keywords = {f.name: sample[f.name] for f in op.arguments if f.keyword_only and not f.group}
    for name, members in op.groups.items():
        values = tuple(sample[f.name] for f in members)
        keywords[name] = None if all(v is None for v in values) else values
    return positional, keywords


def call(op: Op, sample: dict, **extra):
    """The public call. Arguments that are not in the sample are left to their defaults; a state
    that the call updates is a copy of the sample's."""
    full = {f.name: f.python_default for f in op.arguments} | sample
    for f in op.state_outputs:
        state = full[f.updates]
        copy = getattr(state, "clone", None) or getattr(state, "copy", lambda state=state: state)
        full[f.updates] = copy()
    positional, keywords = split(op, full)
    return getattr(fk, op.public_name)(*positional, **keywords, **extra)


def call_with_state(op: Op, sample: dict) -> tuple:
    """All outputs of a NumPy call, as JAX returns them: states that were updated as the last."""
    full = {f.name: f.python_default for f in op.arguments} | sample
    for f in op.state_outputs:
        full[f.updates] = full[f.updates].copy()
    positional, keywords = split(op, full)
    outputs = getattr(fk, op.public_name)(*positional, **keywords)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return (*outputs, *(full[f.updates] for f in op.state_outputs))


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
        subjects = {o.condition_on for o in op.outputs}
        if f.name in subjects | {o.saved_unless for o in op.outputs}:
            values = [c or None for c in f.choices] if f.kind == "choice" else (False, True)
            cases = [{**case, f.name: value} for case in cases for value in values]
    return cases

"""The op declarations, as the library tells them, and what follows from them in any framework:
the public signature, which outputs a call has, their shapes and dtypes, and which op is whose
backward. Nothing here knows an op by name."""

import functools
import json
import math
import operator
import textwrap
from dataclasses import dataclass, field

import numpy as np

from . import _library
from ._fields import Field, field_of
from ._generated import compile_function
from ._output_shapes import output_shapes_of


@dataclass
class Op:
    name: str
    doc: str
    fields: list[Field]
    handle: int
    size_unless_given: dict[str, str] = field(default_factory=dict)
    float8: bool = False  # activations may be 8-bit floats; then outputs T are bfloat16
    autocast: str = "widest"  # the rule of torch.autocast: or "lower", "float32_on_gpu"
    # By symbol, what a call can be cut along: "batch", "independent" or "reduced".
    roles: dict[str, str] = field(default_factory=dict)
    backward: "Op | None" = field(default=None, repr=False)

    def __post_init__(self):
        self.public_name = self.name.removesuffix("_fwd")
        self.is_backward = self.name.endswith("_bwd")
        self.inputs = [f for f in self.fields if f.kind == "input"]
        self.outputs = [f for f in self.fields if f.kind == "output"]
        self.attributes = [f for f in self.fields if not f.is_tensor]
        self.arguments = [f for f in self.fields if f.kind != "output"]  # in slot order
        self.axis = next((f for f in self.fields if f.kind == "axis"), None)
        self.by_name = {f.name: f for f in self.fields}

    # --- derived calls: small functions, written as source once per op -------------------------

    @functools.cached_property
    def output_shapes(self):
        """f(*arguments) -> the shape of every output, absent ones too where they can be told
        (else None). Arguments stand in slot order: tensors (anything with .shape) or None, and
        attribute values (choices by index, axis as an integer)."""
        return output_shapes_of(self)

    @functools.cached_property
    def outputs_wanted(self):
        """f(*arguments) -> for every output, whether its condition holds (saved ones count as
        wanted)."""
        names = ", ".join(f.name for f in self.arguments)
        conditions = ", ".join(self.wanted_expression(f) for f in self.outputs)
        return compile_function(f"def wanted({names}):\n    return ({conditions},)", "wanted")

    def wanted_expression(self, output: Field) -> str:
        condition = output.when
        if not condition:
            return "True"
        if "=" in condition:
            name, _, value = condition.partition("=")
            operator = "!=" if name.endswith("!") else "=="
            name = name.rstrip("!")
            return f"{name} {operator} {self.by_name[name].choices.index(value)}"
        if self.by_name[condition].kind == "input":
            return f"{condition} is not None"
        return f"bool({condition})"

    def shown_expression(self, output: Field) -> str:
        """Python that tells whether a call that needs no gradient returns the output."""
        if output.saved:
            return "False"
        if output.saved_unless:
            return f"bool({output.saved_unless})"
        return self.wanted_expression(output)

    def dtype_source(self, output: Field) -> str:
        """Where an output's dtype comes from: "float32", or the name of an input (bfloat16 where
        that is an 8-bit float)."""
        if output.dtype_rule == "T":
            return next(f.name for f in self.inputs if f.dtype_rule == "T")
        if output.dtype_rule.startswith("@"):
            return output.dtype_rule[1:]
        return {"F": "float32", "J": "int32"}[output.dtype_rule]

    # --- the public signature ------------------------------------------------------------------

    @functools.cached_property
    def in_place_output(self) -> "Field | None":
        """The output that may overwrite an input: the public call then takes `inplace`."""
        return next((f for f in self.outputs if f.may_alias), None)

    @functools.cached_property
    def state_outputs(self) -> list[Field]:
        """The outputs that are inputs' next values: written there where arrays can change."""
        return [f for f in self.outputs if f.updates]

    @property
    def extra_keywords(self) -> list[str]:
        """Switches that follow from the declarations of the op and its backward."""
        extra = ["inplace"] if self.in_place_output else []
        overwritten = self.backward and self.backward.in_place_output
        if overwritten and overwritten.may_alias in self.by_name:
            extra.append("inplace_backward")
        return extra

    @functools.cached_property
    def switches(self) -> list[Field]:
        """The extra keywords, as fields."""
        return [Field(name, "boolean") for name in self.extra_keywords]

    def no_float8_gradient(self) -> "_library.Error":
        return _library.Error(f"{self.public_name}: float8 inputs have no gradient")

    @functools.cached_property
    def groups(self) -> dict[str, list[Field]]:
        """The arguments that Python takes together, as tuples."""
        groups: dict[str, list[Field]] = {}
        for f in self.arguments:
            if f.group:
                groups.setdefault(f.group, []).append(f)
        return groups

    @property
    def parameters(self) -> list[str]:
        """The names of the public call, in order: each group's where its first member stands."""
        names = dict.fromkeys(f.group or f.name for f in self.arguments)
        return [*names, *self.extra_keywords]

    @property
    def signature(self) -> str:
        parts, keyword_only = [], False
        for f in self.arguments:
            if f.keyword_only and not keyword_only:
                parts.append("*")
                keyword_only = True
            if f.group:
                members = self.groups[f.group]
                if f is members[0]:
                    parts.append(f"{f.group}={_group_default(members)!r}")
                continue
            required = f.kind == "input" and not f.optional
            parts.append(f.name if required else f"{f.name}={f.python_default!r}")
        if self.extra_keywords and not keyword_only:
            parts.append("*")
        parts += [f"{name}=False" for name in self.extra_keywords]
        return ", ".join(parts)

    @property
    def flat_signature(self) -> str:
        """The signature of a function that takes every argument by itself, and any by position."""
        parts = []
        for f in self.arguments:
            required = f.kind == "input" and not f.optional
            parts.append(f.name if required else f"{f.name}={f.python_default!r}")
        return ", ".join(parts + [f"{name}=False" for name in self.extra_keywords])

    def public_call(self, function, array_type: type, stack, alike=lambda part: ("dtype", "shape")):
        """A function with the flat signature, as one that takes the public parameters: groups as
        tuples, and arrays that may come in parts as lists too, which `stack` makes one array where
        they have all attributes in common that `alike` tells of the first."""
        lists = [f.name for f in self.inputs if f.stacked]
        if not self.groups and not lists:
            return function
        lines = []
        for name in lists:
            lines.append(f"if isinstance({name}, (list, tuple)):")
            lines.append(f"    {name} = stacked({name!r}, {name})")
        for name, members in self.groups.items():
            left = ", ".join(f.name for f in members)
            lines.append(f"{left} = unpack({name!r}, {name})")
        flat = ", ".join([f.name for f in self.arguments] + self.extra_keywords)
        body = "\n    ".join([*lines, f"return function({flat})"])
        signature = self.signature.replace("*, ", "")
        source = f"def {self.public_name}({signature}):\n    {body}\n"

        def unpack(name: str, value):
            members = self.groups[name]
            if value is None and all(f.kind == "input" for f in members):
                return (None,) * len(members)
            if isinstance(value, (tuple, list)) and len(value) == len(members):
                return value
            expected = ", ".join(f.name.removeprefix(f"{name}_") for f in members)
            if members[0].kind != "input":
                got = repr(value)
            elif isinstance(value, (tuple, list)):
                got = f"a {type(value).__name__} of {len(value)}"
            else:
                got = type(value).__name__
            raise _library.Error(
                f"{self.public_name}: {name}: expected a tuple ({expected}), got {got}"
            )

        def stacked(name: str, parts):
            self._check_parts(name, parts, array_type, alike)
            return stack(parts)

        result = compile_function(
            source, self.public_name, function=function, unpack=unpack, stacked=stacked
        )
        result.__doc__ = self.docstring
        return result

    def _check_parts(self, name: str, parts, array_type: type, alike) -> None:
        """That the parts of an array go together: frameworks would cast some that do not."""
        if not parts:
            raise _library.Error(f"{self.public_name}: {name}: expected at least 1 part, got none")

        def wrong(i, expected, got):
            raise _library.Error(
                f"{self.public_name}: {name}: part {i}: expected {expected}, got {got}"
            )

        for i, part in enumerate(parts):
            if not isinstance(part, array_type):
                wrong(i, array_type.__name__, type(part).__name__)
            for attribute in alike(parts[0]):
                expected, got = getattr(parts[0], attribute), getattr(part, attribute)
                if expected != got:
                    show = tuple if attribute == "shape" else str
                    wrong(i, f"{attribute} {show(expected)}, as the first has", show(got))

    @property
    def docstring(self) -> str:
        lines = [*textwrap.wrap(self.doc, 96), "", "Arguments"]
        for f in self.arguments:
            if f.group and f is self.groups[f.group][0]:
                members = ", ".join(m.name for m in self.groups[f.group])
                lines.append(f"  {f.group}: the tuple ({members})")
            kind = f"{f.type}{', optional' if f.optional else ''}" if f.is_tensor else f.kind
            kind += f.range_text
            kind += ", or a list of its parts" if f.stacked else ""
            choices = f" ({', '.join(c or 'None' for c in f.choices)})" if f.choices else ""
            lines.append(f"  {f.name}: {kind}{choices}: {f.doc}")
        for name in self.extra_keywords:
            lines.append(f"  {name}: {_EXTRA_DOCS[name]}")
        lines += ["", "Returns"]
        for f in self.outputs:
            if not f.saved:
                condition = f.when or f.saved_unless
                when = f" (when {condition})" if condition else ""
                when += f" (JAX; otherwise {f.updates} is updated in place)" if f.updates else ""
                lines.append(f"  {f.name}: {f.type}{when}: {f.doc}")
        return "\n".join(lines)

    def in_python_types(self, given) -> list:
        """The arguments of a call with its attributes in Python's own types (a NumPy integer as
        axis); or the error that names the one that is none."""
        fixed = list(given)
        for i, (f, value) in enumerate(zip(self.arguments, given, strict=False)):
            if f.is_tensor or (f.nullable and value is None):
                continue
            normal = self.normalise(f, value)
            if f.kind != "choice" and not (f.kind == "number" and f.nullable):
                fixed[i] = normal
        return fixed

    def normalise(self, f: Field, value):
        """An attribute as the library takes it: choices by index, numbers as numbers."""
        expected = None
        if f.kind == "choice":
            places = {c or None: i for i, c in enumerate(f.choices)}
            if (value is None or isinstance(value, str)) and value in places:
                return places[value]
            expected = "one of " + ", ".join(map(repr, places))
        elif f.kind == "boolean":
            if isinstance(value, (bool, int, np.bool_, np.integer)):
                return bool(value)
            expected = "True or False"
        elif f.kind == "number":
            expected = "a number"
            if f.nullable:
                expected = "a finite number or None"
                if value is None:
                    return math.inf
            try:
                number = float(value)
                if not f.nullable or math.isfinite(number):
                    return number
            except (TypeError, ValueError, OverflowError):
                pass
        else:
            expected = "an integer"
            try:
                # Asked first, since torch 2.11's compiler does not follow the exception.
                if hasattr(value, "__index__"):
                    integer = operator.index(value)
                    if -(2**63) <= integer < 2**63:
                        return integer
                    expected = "an integer of 64 bits"
            except TypeError:
                pass
            expected += " or None" if f.nullable else ""
        raise _library.Error(f"{self.public_name}: {f.name}: expected {expected}, got {value!r}")


def _group_default(members: list[Field]):
    if all(f.kind == "input" for f in members):
        return None
    return tuple(f.python_default for f in members)


_EXTRA_DOCS = {
    "inplace": "boolean: overwrite the input and return it",
    "inplace_backward": "boolean: the backward writes the gradient over the input's memory",
}


def _load() -> dict[str, Op]:
    ops = {}
    for entry in json.loads(_library.declarations().decode()):
        fields = [field_of(f) for f in entry["fields"]]
        name = entry["name"]
        handle = _library.find_op(name.encode())
        rest = {k: v for k, v in entry.items() if k not in ("name", "doc", "fields")}
        ops[name] = Op(name, entry["doc"], fields, handle, **rest)
    for op in ops.values():
        if op.name.endswith("_fwd"):
            op.backward = ops.get(op.public_name + "_bwd")
    return ops


#: Every op of the library, by name.
OPS: dict[str, Op] = _load()

#: The ops users call, by public name (backward ops are reached through gradients).
PUBLIC: dict[str, Op] = {op.public_name: op for op in OPS.values() if not op.is_backward}

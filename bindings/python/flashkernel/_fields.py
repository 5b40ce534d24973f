"""One argument of an op, as its declaration in the library describes it."""

import functools
from dataclasses import dataclass

from ._shapes import Dim, has_leading_dims, parsed


@dataclass(frozen=True)
class Field:
    name: str
    kind: str  # input, output, number, integer, boolean, choice, axis
    doc: str = ""
    keyword_only: bool = False
    group: str = ""
    type: str = ""
    optional: bool = False
    stacked: bool = False
    along_axis: bool = False
    saved: bool = False
    saved_unless: str = ""
    when: str = ""
    may_alias: str = ""
    updates: str = ""
    below: str = ""
    rises_to: str = ""
    prefer: str = ""
    also_gradient_of: str = ""
    repeats: str = ""
    drawn_between: tuple = ()
    with_float8: bool = False
    factors_unless: str = ""  # an input without which alone the dims have their factors
    shapes: tuple[tuple[Dim, ...], ...] = ()  # alternatives; none: another tensor's
    form: str = ""  # whose alternatives belong together; "": the call's (src/core/declaration.h)
    default: float | int | None = None
    nullable: bool = False
    may_be_infinite: bool = False
    choices: tuple = ()
    least: float | None = None  # what a number or an integer may be
    most: float | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("input", "output")

    @property
    def condition_on(self) -> str:
        """The argument that an output's condition is about; "" if there is no condition."""
        return self.when.partition("=")[0].strip("!")

    @property
    def type_text(self) -> str:
        """The type, and where its factors do not hold."""
        if not self.factors_unless:
            return self.type
        return f"{self.type} (without the factor where {self.factors_unless} is given)"

    @property
    def range_text(self) -> str:
        """ ", at least 0", or "" where any number will do."""
        if self.least is not None and self.most is not None:
            return f", {self.least:g} to {self.most:g}"
        if self.least is not None:
            return f", at least {self.least:g}"
        return "" if self.most is None else f", at most {self.most:g}"

    @functools.cached_property
    def dtype_rule(self) -> str:
        """T, P, F, I, J, or @name."""
        return self.type.partition("[")[0]

    @property
    def expected_dtypes(self) -> str:
        return {
            "T": "float32, float16 or bfloat16",  # a float8 not taken, the library refuses
            "P": "float32 or the activations' dtype",
            "F": "float32",
            "I": "int32 or int64",
            "J": "int32",
        }.get(self.dtype_rule, "a known dtype")

    @property
    def has_leading_dims(self) -> bool:
        """Tells whether the tensor has one declared shape, which begins with any number of dims."""
        return len(self.shapes) == 1 and has_leading_dims(self.shapes[0])

    @property
    def may_have_leading_dims(self) -> bool:
        """Tells whether only some of its alternative shapes begin so."""
        return len(self.shapes) > 1 and any(has_leading_dims(s) for s in self.shapes)

    @property
    def python_default(self):
        """The default as Python spells it: choices by name, None for the nullable and absent."""
        if self.kind == "input" or self.nullable:
            return None
        if self.kind == "number":
            return float(self.default)
        if self.kind == "boolean":
            return bool(self.default)
        if self.kind == "choice":
            return self.choices[self.default] or None
        return self.default


def field_of(entry: dict) -> Field:
    """A field, as the library writes it."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Field(**values | {"shapes": parsed(entry.get("shapes", []))})

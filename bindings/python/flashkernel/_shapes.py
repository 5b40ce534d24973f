"""The shapes in declarations, as the library has parsed them (src/core/dim.h), and what follows in
Python: the size of a dim from that of its symbol, and back. Both are written as source code, so
that the functions generated from declarations and those that only evaluate a shape agree."""

import math
from dataclasses import dataclass


def move_last(shape, axis):
    """A shape with one axis moved to the end."""
    axis = axis + len(shape) if axis < 0 else axis
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def move_back(shape, axis):
    """The inverse of move_last."""
    axis = axis + len(shape) if axis < 0 else axis
    return (*shape[:axis], shape[-1], *shape[axis:-1])


def block_count(size, length):
    """How many whole blocks of a length there are: none of length 0, and by the square root of the
    size, rounded up, where the length is negative."""
    if length < 0:
        length = math.isqrt(size - 1) + 1 if size > 0 else 0
    return size // length if length else 0


@dataclass(frozen=True)
class Dim:
    text: str  # as the declaration has it
    symbol: str = ""  # "": a number; "...": any number of leading dims
    factor: int = 1  # of the symbol's size
    offset: int = 0  # added to it; or the number itself
    or_one: bool = False  # the size may also be 1
    blocks_of: str = ""  # the attribute that is the length of a block

    @property
    def tells_size(self) -> bool:
        """Tells whether a tensor that has this dim gives the symbol its size."""
        return bool(self.symbol) and not self.or_one and not self.blocks_of

    def expression(self, size: str) -> str:
        """Python for the size of the dim, or for all of the leading dims, given that of its symbol.
        The length of a block is a variable of the attribute's name."""
        if not self.symbol:
            return str(self.offset)
        if self.symbol == "...":
            return f"*{size}"
        if self.blocks_of:
            return f"block_count({size}, {self.blocks_of})"
        product = size if self.factor == 1 else f"{self.factor} * {size}"
        return product + _plus(self.offset)

    def symbol_expression(self, size: str) -> str:
        """The inverse: Python for the size of the symbol, given that of the dim."""
        product = size + _plus(-self.offset)
        if self.factor == 1:
            return product
        return f"({product}) // {self.factor}"

    def evaluate(self, size: int, attributes: dict) -> int:
        """The size of the dim, given that of its symbol."""
        variables = {"size": size, "block_count": block_count}
        return eval(self.expression("size"), {**attributes, **variables})


def _plus(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def has_leading_dims(dims) -> bool:
    return bool(dims) and dims[0].symbol == "..."


def parsed(alternatives: list) -> tuple[tuple[Dim, ...], ...]:
    """Alternative shapes, as the library writes them."""
    return tuple(tuple(Dim(**d) for d in dims) for dims in alternatives)

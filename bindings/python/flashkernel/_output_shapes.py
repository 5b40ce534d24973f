"""The shapes of an op's outputs, which follow from those of its inputs: a function for each op,
written as source from its declaration."""

from dataclasses import replace

from ._fields import Field
from ._generated import compile_function
from ._shapes import block_count, has_leading_dims, move_back, move_last


def output_shapes_of(op):
    """Op.output_shapes, for the op."""
    names = ", ".join(f.name for f in op.arguments)
    lines: list[str] = []
    writer = ShapeWriter(op, lines)
    results = [writer.shape(f) for f in op.outputs]
    body = "\n".join(f"    {line}" for line in lines)
    return compile_function(
        f"def output_shapes({names}):\n{body}\n    return ({', '.join(results)},)",
        "output_shapes",
        move_last=move_last,
        move_back=move_back,
        block_count=block_count,
    )


class ShapeWriter:
    """Python expressions for sizes and shapes in a call of an op, by the names of its arguments.
    The lines that they need ahead are appended to `lines`."""

    def __init__(self, op, lines: list[str]):
        self.op = op
        self.lines = lines

    def shape(self, output: Field) -> str:
        """Python for the shape of an output."""
        if not output.shapes:
            other = output.type[1:]
            return f"(None if {other} is None else tuple({other}.shape))"
        if len(output.shapes) == 1:
            return self._alternative(output, 0)
        # The first required input of the output's form says which alternative a call has.
        decides = next(
            f
            for f in self.op.inputs
            if not f.optional and len(f.shapes) > 1 and f.form == output.form
        )
        expression = "None"
        for i in reversed(range(len(output.shapes))):
            shape = self._alternative(output, i)
            rank = len(decides.shapes[i])
            expression = f"({shape} if len({decides.name}.shape) == {rank} else {expression})"
        return expression

    def _alternative(self, output: Field, index: int) -> str:
        parts, needed_optionals = [], set()
        for dim in output.shapes[index]:
            source = "", None
            if dim.symbol:
                source = self.size(dim.symbol, index, output.form)
            if source is None:
                return "None"
            expression, from_field = source
            if from_field is not None and from_field.optional:
                needed_optionals.add(from_field.name)
            parts.append(dim.expression(expression))
        shape = "(" + "".join(f"{p}, " for p in parts) + ")"
        if output.along_axis:
            shape = f"move_back({shape}, {self.op.axis.name})"
        for name in sorted(needed_optionals):
            shape = f"None if {name} is None else {shape}"
        return f"({shape})"

    def size(self, symbol: str, alternative: int = 0, form: str = ""):
        """(Python expression, field) for a symbol's size: from an attribute of its name, else from
        the first input that has it, required ones first, among those whose shape has one spelling
        or, in the alternative of this number of this form, the symbol."""
        named = self.op.by_name.get(symbol)
        if named is not None and not named.is_tensor:
            return symbol, None
        if symbol in self.op.size_unless_given:
            return self._size_unless_given(symbol), None
        for f, dims in self._telling(symbol, alternative, form):
            shape = f"{f.name}.shape"
            if f.along_axis:
                shape = f"{f.name}_moved"
                moved = f"move_last({f.name}.shape, {self.op.axis.name})"
                if f.optional:
                    moved = f"None if {f.name} is None else {moved}"
                line = f"{shape} = {moved}"
                if line not in self.lines:
                    self.lines.append(line)
            if symbol == "...":
                trailing = len(dims) - 1
                return (f"{shape}[:-{trailing}]" if trailing else shape), f
            position = next(i for i, d in enumerate(dims) if d.symbol == symbol and d.tells_size)
            dim = dims[position]
            # Alternatives differ in what stands first.
            if has_leading_dims(dims) or len(f.shapes) > 1:
                position -= len(dims)
            size = dim.symbol_expression(f"{shape}[{position}]")
            if f.factors_unless:
                alone = replace(dim, factor=1).symbol_expression(f"{shape}[{position}]")
                size = f"{size} if {f.factors_unless} is None else {alone}"
            return (size if dim.symbol == dim.text else f"({size})"), f
        return None

    def _telling(self, symbol: str, alternative: int, form: str) -> list[tuple]:
        """The inputs that tell a symbol's size, each with its dims: required ones first, and among
        these the ones that have that very size."""
        found = []
        for f in self.op.inputs:
            if len(f.shapes) > 1 and f.form != form:
                continue
            for dims in f.shapes if len(f.shapes) == 1 else f.shapes[alternative : alternative + 1]:
                if told := [d for d in dims if d.symbol == symbol and d.tells_size]:
                    found.append((f, dims, told[0].text != symbol))
        found.sort(key=lambda entry: (entry[0].optional, entry[2]))
        return [(f, dims) for f, dims, _ in found]

    def _size_unless_given(self, symbol: str) -> str:
        """Python for the size of a symbol that has another's unless an optional input tells it."""
        expression, _ = self.size(self.op.size_unless_given[symbol])
        for f in self.op.inputs:
            for position, dim in enumerate(f.shapes[0] if len(f.shapes) == 1 else ()):
                if dim.symbol == symbol and dim.tells_size:
                    size = dim.symbol_expression(f"{f.name}.shape[{position}]")
                    expression = f"({expression} if {f.name} is None else {size})"
        return expression

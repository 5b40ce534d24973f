"""Writes the package's stubs (.pyi): every op's call with its types and its docstring, out of the
declarations that the library carries, for editors and type checkers. With --check nothing is
written, and the exit code is 1 where a stub is not what the declarations say. FK_LIBRARY names the
library."""

import ast
import inspect
import itertools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bindings" / "python" / "flashkernel"
sys.path.insert(0, str(PACKAGE.parent))

import flashkernel  # noqa: E402
from flashkernel._declarations import PUBLIC, Field, Op, source_of  # noqa: E402

HEADER = '''# Written by tools/generate_stubs.py.
"""{doc}"""

'''
KINDS = {
    "number": "SupportsFloat",
    "integer": "SupportsIndex",
    "axis": "SupportsIndex",
    "boolean": "bool",
}


class Arrays:
    """What a module's ops take and return."""

    def __init__(self, taken: str, returned: str, states_returned: bool):
        self.taken, self.returned, self.states_returned = taken, returned, states_returned


NUMPY = Arrays("NDArray[Any]", "NDArray[Any]", False)
TORCH = Arrays("Tensor", "Tensor", False)
JAX = Arrays("Array", "Array", True)
JAX_OR_NUMPY = Arrays("Array | NDArray[Any]", "Array", True)


def value_type(f: Field, arrays: Arrays) -> str:
    if f.is_tensor:
        taken = arrays.taken
        return f"{taken} | Sequence[{taken}]" if f.stacked else taken
    if f.kind == "choice":
        names = ", ".join(repr(choice or None) for choice in f.choices)
        return f"Literal[{names}]"
    return KINDS[f.kind] + (" | None" if f.nullable else "")


def is_required(f: Field) -> bool:
    return f.kind == "input" and not f.optional


def switches(op: Op) -> list[Field]:
    """The arguments that decide how many arrays a call returns."""
    named = [f.when or f.saved_unless for f in op.outputs if f.when or f.saved_unless]
    fields = [op.by_name[name] for name in named if name in op.by_name]
    assert all(f.keyword_only for f in fields), f"{op.name}: a switch that stands by its place"
    return list(dict.fromkeys(fields, None))


def returned(op: Op, arrays: Arrays, on: dict[str, bool]) -> str:
    """The type of a call's result, given which switches are on."""
    count, exclusive = 0, set()
    for f in op.outputs:
        condition = f.when or f.saved_unless
        if f.saved:
            continue  # the backward alone needs it
        if f.updates:
            count += arrays.states_returned
        elif condition in on:
            count += on[condition]
        elif "=" in condition:  # one choice has this output, every other has another one
            exclusive.add(condition.partition("=")[0].rstrip("!"))
        else:
            count += 1
    count += len(exclusive)
    one = arrays.returned
    return one if count == 1 else f"tuple[{', '.join([one] * count)}]"


def parameters(op: Op, arrays: Arrays, on: dict[str, bool]) -> str:
    """As Op.signature, with types; a switch that is decided takes only what decides it so."""
    parts, keyword_only = [], False
    for f in op.arguments:
        if f.keyword_only and not keyword_only:
            parts.append("*")
            keyword_only = True
        if f.group:
            members = op.groups[f.group]
            if f is members[0]:
                types = ", ".join(value_type(m, arrays) for m in members)
                absent = all(m.kind == "input" for m in members)
                default = ", ".join(source_of(m.python_default) for m in members)
                suffix = " | None = None" if absent else f" = ({default})"
                parts.append(f"{f.group}: tuple[{types}]{suffix}")
        elif f.name in on:
            parts.append(decided(f, arrays, on[f.name]))
        elif is_required(f):
            parts.append(f"{f.name}: {value_type(f, arrays)}")
        elif f.kind == "input":
            parts.append(f"{f.name}: {value_type(f, arrays)} | None = None")
        else:
            parts.append(f"{f.name}: {value_type(f, arrays)} = {source_of(f.python_default)}")
    if op.extra_keywords and not keyword_only:
        parts.append("*")
    parts += [f"{name}: bool = False" for name in op.extra_keywords]
    return ", ".join(parts)


def decided(f: Field, arrays: Arrays, on: bool) -> str:
    if f.is_tensor:
        return f"{f.name}: {value_type(f, arrays)}" if on else f"{f.name}: None = None"
    return f"{f.name}: Literal[True]" if on else f"{f.name}: Literal[False] = False"


def calls(op: Op, arrays: Arrays) -> list[tuple[str, str]]:
    """Parameters and result of each overload; where a switch is not known until the program runs,
    the result may be either."""
    names = [f.name for f in switches(op)]
    cases = [
        dict(zip(names, values, strict=True))
        for values in itertools.product((False, True), repeat=len(names))
    ]
    found = [(parameters(op, arrays, on), returned(op, arrays, on)) for on in cases]
    if names:
        either = " | ".join(dict.fromkeys(result for _, result in found))
        found.append((parameters(op, arrays, {}), either))
    return found


def write_op(op: Op, kinds: list[Arrays]) -> str:
    """One overload for each kind of arrays and each decided result. (One type variable for all
    kinds would not do: the shapes that type checkers know of NumPy arrays have no common type.)
    Editors show the first one's docstring for all."""
    overloads = [call for arrays in kinds for call in calls(op, arrays)]
    lines = []
    for i, (given, result) in enumerate(overloads):
        lines += ["@overload"] if len(overloads) > 1 else []
        head = f"def {op.public_name}({given}) -> {result}:"
        lines += [head, *indented_docstring(op.docstring)] if i == 0 else [head + " ..."]
    return "\n".join([*lines, ""])


def indented_docstring(text: str) -> list[str]:
    assert '"""' not in text and "\\" not in text
    first, *rest = text.splitlines()
    if not rest:
        return [f'    """{first}"""']
    return [f'    """{first}', *(f"    {line}".rstrip() for line in rest), '    """']


def write_function(name: str) -> str:
    """One that is written in flashkernel/__init__.py."""
    function = getattr(flashkernel, name)
    signature = inspect.signature(function)
    parts, keyword_only = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{p.name}: {p.annotation}{default}")
    lines = [f"def {name}({', '.join(parts)}) -> {signature.return_annotation}:"]
    return "\n".join([*lines, *indented_docstring(inspect.getdoc(function)), ""])


def reexports(source: pathlib.Path) -> list[str]:
    """The public names that a module has from its own submodules, `from .mamba import Mamba`, and
    the submodules that are public themselves, `from . import backbones`."""
    lines = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            raise SystemExit(f"{source}: {node.name}: expected it in a submodule, for the stub")
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [a.asname or a.name for a in node.names]
            lines += [
                f"from .{node.module or ''} import {name} as {name}"
                for name in names
                if not name.startswith("_")
            ]
    return lines


def write_all(names: list[str]) -> str:
    return "\n".join(["__all__ = [", *(f'    "{name}",' for name in names), "]", ""])


TYPING = "from collections.abc import Sequence\nfrom typing import Any, Literal, "


def main_stub() -> str:
    submodules = [f"from . import {name} as {name}" for name in flashkernel._SUBMODULES]
    parts = [
        HEADER.format(doc=flashkernel.__doc__),
        "import os as _os\nimport typing as _typing\n",
        TYPING + "SupportsFloat, SupportsIndex, overload\n\n",
        "from jax import Array\nfrom numpy.typing import NDArray\nfrom torch import Tensor\n\n",
        "\n".join(submodules) + "\n",
        "from ._engine import Model as Model\nfrom ._error import Error as Error\n",
        *(
            f"from ._library import {name} as {name}\n"
            for name in ("force_implementation", "num_threads", "set_cpu_target", "set_num_threads")
        ),
        "from ._model import Tokenizer as Tokenizer\n",
        "from ._packed import PackedLinear as PackedLinear\n\n",
        "__version__: str\n\n",
        write_function("build_info") + "\n",
        write_function("load") + "\n",
    ]
    parts += [write_op(op, [NUMPY, TORCH, JAX]) + "\n" for op in PUBLIC.values()]
    parts.append(write_all(flashkernel.__all__))
    return "".join(parts)


def framework_stub(name: str, arrays: Arrays, imports: str) -> str:
    source = PACKAGE / name / "__init__.py"
    doc = ast.get_docstring(ast.parse(source.read_text()), clean=False)
    others = reexports(source)
    parts = [
        HEADER.format(doc=doc),
        TYPING + "SupportsFloat, SupportsIndex, overload\n\n",
        imports,
        "\n".join([*others, "", ""]),
    ]
    parts += [write_op(op, [arrays]) + "\n" for op in PUBLIC.values()]
    parts.append(write_all([*PUBLIC, *(line.split()[-1] for line in others)]))
    return "".join(parts)


def stubs() -> dict[pathlib.Path, str]:
    torch = framework_stub("torch", TORCH, "from torch import Tensor\n\n")
    imports = "from jax import Array\nfrom numpy.typing import NDArray\n\n"
    jax = framework_stub("jax", JAX_OR_NUMPY, imports)
    return {
        PACKAGE / "__init__.pyi": main_stub(),
        PACKAGE / "torch" / "__init__.pyi": torch,
        PACKAGE / "jax" / "__init__.pyi": jax,
    }


def main() -> int:
    stale = {
        path: text
        for path, text in stubs().items()
        if not path.exists() or path.read_text() != text
    }
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the declarations say: run {sys.argv[0]}")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

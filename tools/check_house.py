"""Every op must have a reference, a test that names it and a line in the docs. FK_LIBRARY names the
library whose ops are looked at."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bindings" / "python"))

import flashkernel  # noqa: E402
from flashkernel._declarations import OPS  # noqa: E402


def read(folder: str, *endings: str) -> str:
    files = sorted(f for f in (ROOT / folder).rglob("*") if f.suffix in endings)
    return "\n".join(f.read_text() for f in files)


def has_reference(op: str) -> bool:
    try:
        flashkernel.force_implementation(op, "reference")
    except flashkernel.Error:
        return False
    flashkernel.force_implementation(op, None)
    return True


def main() -> int:
    tests, docs = read("tests", ".py", ".cc"), read("docs", ".md")
    missing = []
    for op in OPS.values():
        # A backward is tested and documented through the op users call.
        name = re.escape(op.name.removesuffix("_bwd").removesuffix("_fwd"))
        if not has_reference(op.name):
            missing.append(f"{op.name}: no implementation 'reference' (src/ops/*/reference.cc)")
        # Not the bare word: `sum` and `max` are everywhere.
        if not re.search(rf"\bfk\.{name}\b|[\"']{name}(_fwd|_bwd)?[\"']", tests):
            missing.append(f"{op.name}: no file under tests/ names it")
        if not re.search(rf"\bfk\.{name}\b|`{name}\b", docs):
            missing.append(f"{op.name}: no page under docs/ names it")
        if not op.doc:
            missing.append(f"{op.name}: no kDoc in its declaration")
    for line in missing:
        print(line, file=sys.stderr)
    print(f"{len(OPS)} ops, {len(missing)} things missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

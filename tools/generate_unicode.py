"""Writes src/model/unicode_tables.inc: what canonical composition (NFC) needs of Unicode.

python tools/generate_unicode.py > src/model/unicode_tables.inc
"""

import sys
import unicodedata

CODE_POINTS = [c for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
HANGUL = range(0xAC00, 0xAC00 + 11172)  # composed by arithmetic


def rows(values, columns=100):
    """C initialisers, as many to a line as fit."""
    line = ""
    for value in values:
        if len(line) + len(value) + 2 > columns:
            yield line.rstrip()
            line = ""
        line += value + ", "
    if line:
        yield line.rstrip()


def combining_classes():
    """(first, last, class) for runs of marks of one class."""
    runs = []
    for c in CODE_POINTS:
        k = unicodedata.combining(chr(c))
        if not k:
            continue
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == k:
            runs[-1][1] = c
        else:
            runs.append([c, c, k])
    return runs


def decompositions():
    """(composed, first, second, composes); second is 0 for a character that is another's twin."""
    for c in CODE_POINTS:
        text = unicodedata.decomposition(chr(c))
        if not text or text.startswith("<") or c in HANGUL:
            continue
        parts = [int(p, 16) for p in text.split()] + [0]
        composes = unicodedata.normalize("NFC", chr(c)) == chr(c)
        yield c, parts[0], parts[1] if len(parts) > 2 else 0, int(composes)


print(f"// Unicode {unicodedata.unidata_version}. Written by tools/generate_unicode.py.")
print("constexpr CombiningRun kCombining[] = {")
print("\n".join(rows(f"{{{a:#x}, {b:#x}, {k}}}" for a, b, k in combining_classes())))
print("};")
print("constexpr Decomposition kDecompositions[] = {")
print("\n".join(rows(f"{{{c:#x}, {a:#x}, {b:#x}, {k}}}" for c, a, b, k in decompositions())))
print("};")

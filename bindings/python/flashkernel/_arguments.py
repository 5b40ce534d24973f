"""Python's values as arguments of C functions. What C would read as something else is refused with
an error that names the call and the argument: a text that a null character would cut, a number that
its integers do not hold."""

import operator
import os

import numpy as np

from ._error import Error

_INT32, _INT64 = 2**31, 2**63


def text(call: str, argument: str, value) -> bytes:
    """A text that ends where its first null character stands: there may be none inside."""
    if not isinstance(value, str):
        raise Error(f"{call}: {argument}: expected a text, got {value!r}")
    try:
        raw = value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise Error(f"{call}: {argument}: expected a text of Unicode, got {value!r}") from None
    return _without_null(call, argument, "a text", value, raw)


def path(call: str, argument: str, value) -> bytes:
    """A file's name, as the system has it."""
    try:
        raw = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        raise Error(f"{call}: {argument}: expected a path, got {value!r}") from None
    return _without_null(call, argument, "a path", value, raw)


def _without_null(call: str, argument: str, what: str, value, raw: bytes) -> bytes:
    if b"\0" in raw:
        raise Error(f"{call}: {argument}: expected {what} without null characters, got {value!r}")
    return raw


def ids(call: str, argument: str, values, expected="a list of integers") -> np.ndarray:
    """Token ids, in an array that nobody else can change while the library reads it."""
    try:
        array = np.array(values)
    except (ValueError, TypeError, OverflowError):
        array = None  # lists of different lengths
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise Error(f"{call}: {argument}: expected {expected}, got {type(values).__name__}")
    if array.size and (array.min() < -_INT32 or array.max() >= _INT32):
        wrong = array.min() if array.min() < -_INT32 else array.max()
        raise Error(f"{call}: {argument}: expected token ids, got {wrong}")
    return np.ascontiguousarray(array, np.int32)


def number(call: str, argument: str, kind, value, least=-_INT64, below=_INT64):
    """A value as a float, or as an integer (kind operator.index) that a C integer holds."""
    try:
        result = kind(value)
        if kind is float or least <= result < below:
            return result
        expected = f"{least} or more" if result < least else f"at most {below - 1}"
    except (TypeError, ValueError, OverflowError):
        expected = "a number" if kind is float else "an integer"
    raise Error(f"{call}: {argument}: expected {expected}, got {value!r}")


def integer(call: str, argument: str, value, least=-_INT64, below=_INT64) -> int:
    return number(call, argument, operator.index, value, least, below)

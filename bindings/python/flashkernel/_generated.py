"""Functions that are written as source when they are needed, once per op."""

import itertools
import linecache

_sources = itertools.count(1)


def compile_function(source: str, name: str, **namespace):
    """The function of this name that the source defines. Tracebacks and debuggers find its lines
    where Python keeps those of files."""
    place = f"<flashkernel {name}, generated source {next(_sources)}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    exec(compile(source, place, "exec"), namespace)
    return namespace[name]

"""The module as a whole: what `dir` shows, and what `import *` brings."""

import builtins
import linecache
import pathlib
import pkgutil
import subprocess
import sys
import traceback

import pytest

import flashkernel as fk
from flashkernel._declarations import PUBLIC


def run_script(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_dir_shows_what_users_call():
    shown = set(dir(fk))
    assert {"Error", "Model", "Tokenizer", "load", "build_info", *PUBLIC} <= shown
    assert not [name for name in shown if name.startswith("_") and not name.endswith("__")]
    assert not [name for name in shown if not hasattr(fk, name)]


def test_dir_shows_every_submodule():
    folders = [str(pathlib.Path(fk.__file__).parent)]
    found = {m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_")}
    assert found == set(fk._SUBMODULES)
    assert {"bench", "compat", "pull"} <= set(dir(fk))


def test_dir_imports_nothing_and_shows_only_what_can_be_imported():
    said = run_script("""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            raise ImportError("blocked")
sys.meta_path.insert(0, Block())
import flashkernel as fk
assert "jax" not in dir(fk) and "bench" in dir(fk)
print(sorted({"torch", "jax"} & set(sys.modules)))
""")
    assert said == "[]"


def test_import_star():
    names = {}
    exec("from flashkernel import *", names)
    assert names["rms_norm"] is fk.rms_norm and names["Tokenizer"] is fk.Tokenizer
    assert not [name for name in names if hasattr(builtins, name)]
    assert names.keys() - {"__builtins__"} == set(fk.__all__)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'tokeniser'"):
        fk.tokeniser  # noqa: B018


def test_tracebacks_show_generated_lines():
    """The functions of the ops are written when the module is imported, and stand in no file."""
    try:
        fk.softmax("no array")
    except fk.Error as error:
        lines = traceback.format_exception(error)
    assert "    call = find_call('softmax', 'x', x)\n" in "".join(lines)
    places = [line for line in lines if "generated source" in line]
    assert places and all(p.startswith('  File "<flashkernel softmax, generated') for p in places)


def test_every_generated_source_keeps_its_lines():
    """Also where several functions bear one name, as the forwards of all ops do."""
    functions = [f for module in (fk, fk._numpy) for f in (getattr(module, n) for n in PUBLIC)]
    places = {f.__code__.co_filename for f in functions}
    assert len(places) == len(functions)
    for f in functions:
        lines = linecache.getlines(f.__code__.co_filename)
        assert lines[f.__code__.co_firstlineno - 1].startswith(f"def {f.__name__}(")

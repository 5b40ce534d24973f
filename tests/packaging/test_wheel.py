"""The wheel: what is in it, and that it works in a Python with only NumPy, with torch, with JAX."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT, run

# One call of one op, with what it needs of a framework.
USE = {
    "numpy": """
import numpy as np, flashkernel as fk
y = fk.softmax(np.ones((2, 4), np.float32))
assert type(y) is np.ndarray and np.allclose(y, 0.25), y
""",
    "torch": """
import torch, flashkernel as fk
x = torch.ones(2, 4, requires_grad=True)
y = fk.softmax(x)
y.sum().backward()
assert torch.allclose(y, torch.full((2, 4), 0.25)) and x.grad.shape == (2, 4)
""",
    "jax": """
import jax, jax.numpy as jnp, flashkernel as fk
y = jax.jit(fk.softmax)(jnp.ones((2, 4)))
assert jnp.allclose(y, 0.25), y
""",
}
# Put first, makes the modules as good as not installed.
BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
"""
UNLOADED = "import sys; assert not {modules!r} & set(sys.modules), sorted(sys.modules)"


def test_one_wheel_for_every_python(wheel):
    assert re.fullmatch(r"flashkernel-[0-9.]+-py3-none-linux_(x86_64|aarch64)\.whl", wheel.name)


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [n for n in names if ".so" in n]
    assert libraries == ["flashkernel/lib/libflashkernel.so"]
    assert [n for n in names if re.fullmatch(r"flashkernel-[^/]*\.data/scripts/fk", n)]
    package = ROOT / "bindings" / "python"
    for kind in ("*.py", "*.pyi", "py.typed"):
        sources = list((package / "flashkernel").rglob(kind))
        assert sources and {s.relative_to(package).as_posix() for s in sources} <= set(names)
    strays = [n for n in names if not re.match(r"flashkernel(/|-[^/]*\.(data|dist-info)/)", n)]
    assert not strays


def test_editable(prefix, tmp_path):
    """`pip install -e` leaves the Python files where they are, and puts the library elsewhere."""
    sources, built = ROOT / "bindings" / "python" / "flashkernel", tmp_path / "flashkernel"
    (built / "lib").mkdir(parents=True)
    library = built / "lib" / "libflashkernel.so"
    library.symlink_to(next(prefix.rglob("libflashkernel.so")))
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "flashkernel", "{sources}/__init__.py", submodule_search_locations=["{sources}", "{built}"]
)
sys.modules["flashkernel"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from flashkernel import _library
print(_library.path)
"""
    environment = {k: v for k, v in os.environ.items() if k != "FK_LIBRARY"}
    assert run(sys.executable, "-c", code, env=environment).strip() == str(library)


def test_needs_only_numpy(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
    needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    assert [n for n in needs if "extra ==" not in n] == ["numpy>=1.23"]


def test_license(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = next(n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
    fields = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(fields)
    text = archive.read(metadata.replace("METADATA", "licenses/LICENSE"))
    assert text == (ROOT / "LICENSE").read_bytes()
    # The standard text to the byte, so that tools which compare know it.
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256(text).hexdigest() == digest


def test_numpy_only(bare_environment):
    python = bare_environment / "python"
    for module in ("torch", "jax", "ml_dtypes"):
        found = f"import importlib.util as u; assert u.find_spec({module!r}) is None"
        run(python, "-c", found)
    run(python, "-c", USE["numpy"])


def test_program(bare_environment):
    fk = bare_environment / "fk"
    environment = {"PATH": "/usr/bin:/bin"}
    version = run(
        bare_environment / "python", "-c", "import flashkernel as f; print(f.__version__)"
    )
    assert run(fk, "--version", env=environment).strip() == f"fk {version.strip()}"
    assert "softmax_fwd" in run(fk, "info", env=environment)
    assert "ok" in run(fk, "check", "softmax", "--device", "cpu", env=environment)
    assert "bench" in run(fk, "--help", env=environment)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "sofmax"], "sofmax"),
        (["check", "--device", "tpu"], "tpu"),
        (["nonsense"], "nonsense"),
        ([], "--help"),
    ],
)
def test_program_refuses(bare_environment, arguments, message):
    done = subprocess.run([bare_environment / "fk", *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr


def test_what_the_environment_cannot_force_is_told(bare_environment):
    for wrong in ("softmax=reference", "softmax_fwd=abacus", "softmax_fwd"):
        done = subprocess.run(
            [bare_environment / "fk", "check", "softmax", "--device", "cpu"],
            capture_output=True,
            text=True,
            env=os.environ | {"FK_IMPL": wrong},
        )
        assert done.returncode == 0
        assert "flashkernel: FK_IMPL: " in done.stderr and "; ignored" in done.stderr


def test_bench_without_python(bare_environment):
    environment = os.environ | {"FK_PYTHON": "/nowhere/python3"}
    done = subprocess.run(
        [bare_environment / "fk", "bench"], capture_output=True, text=True, env=environment
    )
    assert done.returncode != 0
    assert "FK_PYTHON" in done.stderr


@pytest.mark.parametrize("framework, other", [("torch", "jax"), ("jax", "torch")])
def test_with_one_framework(wheel, framework, other, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    code = BLOCK.format(blocked={other}) + USE[framework] + UNLOADED.format(modules={other})
    run(sys.executable, "-c", code, cwd=tmp_path)


def test_frameworks_are_loaded_only_when_used(wheel, tmp_path):
    code = USE["numpy"] + UNLOADED.format(modules={"torch", "jax"})
    run(sys.executable, "-c", code, cwd=tmp_path)

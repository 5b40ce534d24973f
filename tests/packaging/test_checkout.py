"""What a checkout's scripts do where something is missing or goes wrong."""

import os
import shutil
import subprocess

import pytest

from conftest import ROOT, run

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    """A source tree with nothing of Git, whose tools are scripts that a test writes."""
    for name in ("Makefile", "scripts/sources.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write(tmp_path / "scripts/packages.sh", "#!/bin/sh\n")
    for requirements in ("demo", "test"):
        write(tmp_path / f"scripts/requirements-{requirements}.txt")
    for source in ("src/op.cc", "src/build_op.h", "build-old/generated.cc", ".venv/numpy.h"):
        write(tmp_path / source)
    return tmp_path


def make(tree, *arguments):
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    return subprocess.run(
        ["make", "-C", tree, *arguments], capture_output=True, text=True, env=environment
    )


def test_sources_without_git(tree):
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    listed = run(tree / "scripts/sources.sh", env=environment)
    assert sorted(listed.split()) == ["src/build_op.h", "src/op.cc"]


@needs_make
@pytest.mark.parametrize(
    "failing", ["scripts/sources.sh", ".venv/bin/clang-format", ".venv/bin/ruff", None]
)
def test_format_says_when_it_fails(tree, failing):
    for tool in ("clang-format", "ruff", "pip", "python"):
        write(tree / ".venv/bin" / tool, "#!/bin/sh\n")
    write(tree / ".venv/test.stamp")
    if failing:  # but not `ruff format`
        write(tree / failing, '#!/bin/sh\n[ "$1" = format ]\n')
    assert (make(tree, "format").returncode != 0) == (failing is not None)


@needs_make
def test_environment_that_was_left_half_made(tree):
    """As Python's venv leaves it where it has no ensurepip: without pip."""
    half = 'mkdir -p .venv/bin; echo "#!/bin/sh" > .venv/bin/python; chmod +x .venv/bin/python'
    write(tree / "half", f"#!/bin/sh\n{half}\nexit 1\n")
    write(tree / "whole", f"#!/bin/sh\n{half}\ncp .venv/bin/python .venv/bin/pip\n")
    assert make(tree, ".venv/demo.stamp", "PYTHON=./half").returncode != 0
    done = make(tree, ".venv/demo.stamp", "PYTHON=./whole")
    assert done.returncode == 0, done.stderr

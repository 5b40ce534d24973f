import os
import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def data() -> pathlib.Path:
    """The stories model and its text, which are not part of the project."""
    folder = ROOT.parent / "shared" / "data"
    if not (folder / "stories260K.bin").exists():
        pytest.skip(f"{folder} has no stories260K.bin")
    return folder


@pytest.fixture(scope="session")
def fk_program() -> str:
    """FK_PROGRAM, or the `fk` that is installed beside this Python."""
    beside = pathlib.Path(sys.executable).with_name("fk")
    program = os.environ.get("FK_PROGRAM") or (str(beside) if beside.exists() else None)
    program = program or shutil.which("fk")
    if program is None:
        pytest.skip("no fk program: name one in FK_PROGRAM")
    return program

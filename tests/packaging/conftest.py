import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, **options) -> str:
    """What a command prints; its output is the message where it fails."""
    done = subprocess.run(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel() -> pathlib.Path:
    wheels = sorted((ROOT / "dist").glob("flashkernel-*.whl"))
    if not wheels:
        pytest.skip("no wheel in dist/: run `make wheel`")
    return wheels[-1]


@pytest.fixture(scope="session")
def bare_environment(wheel, tmp_path_factory) -> pathlib.Path:
    """A Python that has NumPy and the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "-q", wheel, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> pathlib.Path:
    """Where the CMake build is installed."""
    if not (ROOT / "build" / "libflashkernel.a").exists():
        pytest.skip("no build/: run `make test`, or cmake and ninja")
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", ROOT / "build", "--prefix", folder)
    return folder

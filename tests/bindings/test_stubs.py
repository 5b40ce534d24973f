"""The stubs: as the declarations say, and what mypy makes of right and wrong calls."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import flashkernel as fk

ROOT = pathlib.Path(__file__).parents[2]

# A line that ends in `# wrong` must be refused, any other taken; `# -> T` is the type of its value,
# where `numpy` stands for an array of any shape and dtype.
CALLS = """
import jax
import numpy as np
import torch
from numpy.typing import NDArray

import flashkernel as fk

x = np.ones((2, 4), np.float32)
w = np.ones(4, np.float32)
ids = np.zeros(2, np.int64)
t = torch.ones(2, 4)
j = jax.numpy.ones((2, 4))

fk.softmax(x)  # -> numpy
fk.softmax(t)  # -> Tensor
fk.softmax(j)  # -> Array
fk.softmax(torch.nn.Parameter(t))  # -> Tensor
fk.softmax([1.0, 2.0])  # wrong
fk.softmax(x, axis="last")  # wrong
fk.softmax(x, axis=np.int64(-1))
fk.softmax(x, dim=-1)  # wrong
fk.softmax()  # wrong
fk.sum(x, None)
fk.rms_norm(x, w)  # -> numpy
fk.rms_norm(x, w, residual=x)  # -> tuple[numpy, numpy]
fk.rms_norm(t, residual=t)  # -> tuple[Tensor, Tensor]
fk.rms_norm(t, residual=None)  # -> Tensor
fk.rms_norm(x, t)  # wrong
fk.rms_norm(x, w, None, x)  # wrong
fk.rms_norm(x, eps="small")  # wrong
fk.rms_norm(x, eps=np.float32(1e-6))
fk.cross_entropy(x, ids, reduction="none")  # -> numpy
fk.cross_entropy(x, ids, reduction="median")  # wrong
fk.attention(t, t, t, causal=True)  # -> Tensor
fk.attention(t, t, t, return_lse=True)  # -> tuple[Tensor, Tensor]
fk.attention(t, t, t, return_lse=bool(t.sum()))  # -> Tensor | tuple[Tensor, Tensor]
fk.attention(t, t, t, window=(3, 0), rotary=(t, t))
fk.attention(t, t, t, window=3)  # wrong
fk.merge_attention_states([j, j], j)  # -> tuple[Array, Array]
fk.causal_conv1d_update(t, t, t)  # -> Tensor
fk.causal_conv1d_update(j, j, j)  # -> tuple[Array, Array]
fk.causal_conv1d(t, t, activation="silu")
fk.causal_conv1d(t, t, activation="gelu")  # wrong
fk.rope(t, t, t, inplace=True)  # -> Tensor
fk.softmaxx(x)  # wrong
fk.torch.softmax(t)  # -> Tensor
fk.torch.softmax(x)  # wrong
fk.torch.Mamba(16)
fk.jax.softmax(x)  # -> Array
fk.jax.causal_conv1d_update(j, j, j)  # -> tuple[Array, Array]
fk.num_threads()  # -> int
fk.set_num_threads("2")  # wrong
fk.build_info()["version"]
fk.load("smollm2", context=100)  # -> Model
fk.load(5)  # wrong
fk.load().generate("The sea", stop=["."])  # -> str
fk.load().generate([{"role": "user", "content": "Hello"}], stream=True)  # -> Iterator[str]
fk.load().generate("The sea", temp=0.5)  # wrong
fk.load().logits([1, 2])  # -> ndarray[Any, Any]
fk.load().step("a")  # wrong
fk.Tokenizer("model.gguf").encode("The sea", add_special_tokens=False)  # -> list[int]
fk.Tokenizer("model.gguf").decode([1, 2])  # -> str
fk.Tokenizer("model.gguf").encode(5)  # wrong
fk.Error("a text")  # -> Error
"""


def generator():
    spec = importlib.util.spec_from_file_location("stubs", ROOT / "tools" / "generate_stubs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stubs_are_what_the_declarations_say():
    """`python tools/generate_stubs.py` brings them up to date."""
    for path, text in generator().stubs().items():
        assert path.read_text() == text, f"{path.name}: run tools/generate_stubs.py"


def test_every_name_of_the_module_is_in_its_stub():
    text = (ROOT / "bindings/python/flashkernel/__init__.pyi").read_text()
    shown = {name for name in dir(fk) if not name.startswith("_")}
    assert not [name for name in shown if not re.search(rf"(def|as) {name}\b", text)]


def test_calls(tmp_path):
    for package in ("mypy", "torch", "jax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    # A value's type is asked for beside it, so that one run tells everything.
    lines = [
        re.sub(r"^(fk\..*?)  # -> .*", r"reveal_type(\1)", line) for line in CALLS.splitlines()
    ]
    (tmp_path / "calls.py").write_text("\n".join(lines))
    package = pathlib.Path(fk.__file__).parents[1]
    # Installed packages mypy finds by itself, and refuses to be told of.
    found = {} if package.name == "site-packages" else {"MYPYPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-error-summary"]
        + ["--no-incremental", "--no-color-output", "calls.py"],
        cwd=tmp_path,
        env=os.environ | found,
        capture_output=True,
        text=True,
    )
    said = {}
    for line in (done.stdout + done.stderr).splitlines():
        found = re.match(r"calls\.py:(\d+): (error|note): (.*)", line)
        assert found, line
        said.setdefault(int(found[1]), []).append((found[2], found[3]))
    for number, line in enumerate(CALLS.splitlines(), 1):
        messages = said.get(number, [])
        errors = [text for kind, text in messages if kind == "error"]
        assert bool(errors) == line.endswith("# wrong"), (line, errors)
        if "# -> " in line:
            revealed = messages[0][1].partition('"')[2].removesuffix('"')
            plain = re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed)
            plain = plain.replace("ndarray[tuple[Any, ...], dtype[Any]]", "numpy")
            assert plain == line.partition("# -> ")[2], (line, revealed)

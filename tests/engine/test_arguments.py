"""Texts and paths that C would read as others, and errors about bytes that are no text."""

import os
import pathlib

import numpy as np
import pytest

import flashkernel as fk
import tiny_models
from flashkernel._model import ModelFile, dequantize


class Named(os.PathLike):
    def __init__(self, name):
        self.name = name

    def __fspath__(self):
        return self.name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return fk.load(tiny_models.llama2c(tmp_path_factory.mktemp("tiny")))


def talk(role="user", content="Hello"):
    return [{"role": role, "content": content}]


# What each call says in front, and the call with a text or path that ends early for C.
CUT = {
    "load: path_or_name": lambda model, path: fk.load(path + "\0.gguf"),
    "load: path_or_name:": lambda model, path: fk.load(os.fsencode(path) + b"\0.gguf"),
    "load: path_or_name: expected a path": lambda model, path: fk.load(Named(path + "\0")),
    "load: tokenizer": lambda model, path: fk.load(path, tokenizer="tokenizer.bin\0"),
    "load: cache": lambda model, path: fk.load(path, cache="f16\0"),
    "load: quantize": lambda model, path: fk.load(path, quantize="q8_0\0"),
    "load: path": lambda model, path: ModelFile(path + "\0"),
    "Tokenizer: path_or_name": lambda model, path: fk.Tokenizer(path + "\0"),
    "token_id: token": lambda model, path: model.tokenizer.token_id("<s>\0"),
    "generate: stop": lambda model, path: model.generate("", stop=["x", "\0"], max_tokens=1),
    "chat: messages": lambda model, path: model.tokenizer.format_chat(talk("user\0")),
    "chat: messages:": lambda model, path: model.tokenizer.format_chat(talk(content="a\0b")),
    "set_cpu_target: name": lambda model, path: fk.set_cpu_target("sse4\0"),
    "force_implementation: op": lambda model, path: fk.force_implementation("softmax_fwd\0", None),
    "force_implementation: implementation": lambda model, path: fk.force_implementation(
        "softmax_fwd", "reference\0"
    ),
    "dequantize: kind": lambda model, path: dequantize("Q8_0\0", np.zeros(34, np.uint8), 32),
}


@pytest.mark.parametrize("argument", CUT)
def test_null_characters_are_refused(tiny, argument):
    with pytest.raises(fk.Error, match=f"^{argument}.*without null characters"):
        CUT[argument](tiny, tiny.config["path"])


def test_prompts_keep_null_characters(tiny):
    """Where the length is told, a null character is one like any other."""
    text = "a\0b"
    ids = tiny.tokenizer.encode(text, parse_special=False)
    assert len(ids) == len(tiny.tokenizer.encode("aXb")) and tiny.tokenizer.decode(ids) == text
    tiny.generate(text, max_tokens=1)
    tiny.generate("aXb", max_tokens=1)  # shares a beginning of 2 or 3 tokens with the one before
    assert tiny.last_result["prompt_tokens"] == 2


@pytest.mark.parametrize(
    "path", [b"/nowhere/\xff\x1b.gguf", os.fsdecode(b"/nowhere/\xff\x1b.gguf")], ids=repr
)
@pytest.mark.parametrize("call", [fk.load, lambda p: fk.Tokenizer(p), lambda p: ModelFile(p)])
def test_errors_about_bytes_that_are_no_text(call, path):
    with pytest.raises(fk.Error, match=r"/nowhere/\\xFF\\x1B\.gguf"):
        call(path)


def test_errors_about_files_whose_names_are_no_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    pathlib.Path(os.fsdecode(path)).write_bytes(b"GGUF" + bytes(60))
    for call in (fk.load, fk.Tokenizer, ModelFile):
        with pytest.raises(fk.Error, match=r"\\xFF\.gguf"):
            call(path)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: fk.load("\ud800"), "load: path_or_name: expected a path"),
        (lambda m: m.generate("", stop="\ud800"), "generate: stop: expected a text of Unicode"),
        (lambda m: m.tokenizer.token_id("\ud800"), "token_id: token: expected a text of Unicode"),
        (lambda m: m.tokenizer.token_id(5), "token_id: token: expected a text, got 5"),
        (lambda m: m.tokenizer.encode(5), "encode: text: expected a text, got 5"),
        (lambda m: m.tokenizer.encode(b"a"), "encode: text: expected a text, got b'a'"),
        (lambda m: m.tokenizer.decode([[1], [2, 3]]), "decode: ids: expected a list of integers"),
        (lambda m: m.tokenizer.decode([2**40]), "decode: ids: expected token ids, got 1099511627"),
        (lambda m: m.tokenizer.format_chat(["Hello"]), "chat: messages: expected a text as role"),
        (lambda m: m.logits([-(2**31) - 1]), "logits: token_ids: expected token ids, got -21474"),
        (lambda m: fk.Tokenizer(5), "Tokenizer: path_or_name: expected a path, got 5"),
        (lambda m: fk.set_cpu_target(5), "set_cpu_target: name: expected a text, got 5"),
        (lambda m: fk.force_implementation(5, None), "force_implementation: op: expected a text"),
        (lambda m: dequantize("Q8_0", np.zeros(34, np.uint8), -32), "dequantize: count: expected"),
    ],
)
def test_what_is_no_text_is_refused(tiny, call, message):
    with pytest.raises(fk.Error, match=message):
        call(tiny)


def test_names_cannot_speak_to_the_terminal(tmp_path):
    path = tiny_models.llama2c(tmp_path, name="\x1b[2J\x9b1m\u202eevil\n.bin")
    shown = repr(fk.load(path))
    assert shown.isprintable() and r"\x1b[2J\x9b1m\u202eevil\n.bin" in shown
    path.rename(tmp_path / "\x1b]0;title\x07.gguf")
    with pytest.raises(fk.Error) as refused:
        fk.load(tmp_path / "\x1b]0;title\x07.gguf")
    assert str(refused.value).isprintable() and r"\x1B]0;title\x07.gguf" in str(refused.value)

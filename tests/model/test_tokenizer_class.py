"""`fk.Tokenizer`: the same tokenizer from every kind of file that `fk.load` takes."""

import pathlib
import shutil

import pytest

import flashkernel as fk
import tiny_models
from test_files import gpt2_folder

TEXT = "It was on a dreary night, \u00e4"


@pytest.fixture
def folder(tmp_path):
    return tiny_models.chat_folder(tmp_path / "model")


def test_builtin():
    tokenizer, model = fk.Tokenizer(""), fk.load()
    assert tokenizer.encode(TEXT) == model.tokenizer.encode(TEXT)
    assert tokenizer.vocab_size == model.tokenizer.vocab_size == model.config["vocab"]
    assert tokenizer.vocab_size == len(tokenizer) == tokenizer.size


def test_hugging_face(folder):
    """The folder, its weights, and the tokenizer's own file."""
    expected = fk.load(folder).tokenizer.encode(TEXT)
    for path in (folder, folder / "model.safetensors", folder / "tokenizer.json"):
        tokenizer = fk.Tokenizer(path)
        assert tokenizer.encode(TEXT) == expected and tokenizer.decode(expected) == TEXT
        assert tokenizer.vocab_size == 258 and tokenizer.chat_format == "chatml"


@pytest.mark.parametrize("name", ["model.bin", "tokenizer.bin"])
def test_llama2c(tmp_path, name):
    expected = fk.load(tiny_models.llama2c(tmp_path)).tokenizer.encode(TEXT)
    tokenizer = fk.Tokenizer(str(tmp_path / name))
    assert tokenizer.encode(TEXT) == expected and tokenizer.vocab_size == 259
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert expected == [tokenizer.bos, *plain]
    assert tokenizer.encode(TEXT, False) == plain == tokenizer.encode(TEXT, add_special=False)
    assert tokenizer.decode(expected) == TEXT == tokenizer.decode(expected, skip_special=True)
    assert tokenizer.decode(expected, skip_special_tokens=False) == "<s> " + TEXT


def test_gguf():
    path = pathlib.Path(__file__).parents[2] / "src" / "model" / "builtin.gguf"
    assert fk.Tokenizer(path).encode(TEXT) == fk.Tokenizer().encode(TEXT)


def test_known_name(monkeypatch, tmp_path):
    monkeypatch.setenv("FK_CACHE", str(tmp_path))
    with pytest.raises(fk.Error, match="`fk pull smollm2` fetches it"):
        fk.Tokenizer("smollm2")
    with pytest.raises(fk.Error, match="no such file or folder, and no known model"):
        fk.Tokenizer("smollm3")


def test_without_a_tokenizer(tmp_path):
    gpt2_folder(tmp_path)
    with pytest.raises(fk.Error, match="model.safetensors: has no tokenizer beside it; name one"):
        fk.Tokenizer(tmp_path / "model.safetensors")
    with pytest.raises(fk.Error, match="tokenizer.json"):
        fk.Tokenizer(tmp_path)


def test_llama2c_without_or_with_the_wrong_tokenizer(tmp_path):
    model = tiny_models.llama2c(tmp_path)
    (tmp_path / "tokenizer.bin").unlink()
    with pytest.raises(fk.Error, match="model.bin: has no tokenizer beside it; name one"):
        fk.Tokenizer(model)
    other = tmp_path / "other"
    other.mkdir()
    tiny_models.llama2c(other, [b"more"])
    shutil.copy(other / "tokenizer.bin", tmp_path)
    with pytest.raises(fk.Error, match="expected 259 tokens, as the model has, got 260"):
        fk.Tokenizer(model)

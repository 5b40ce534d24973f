"""Model files and tokenizers, through the library's C functions (flashkernel/model.h)."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import _arguments
from ._handle import Handle, Owner
from ._library import Error, check, function

_pointer, _text, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_flag, _int64 = ctypes.c_int32, ctypes.c_int64
_sizes, _texts = ctypes.POINTER(_size), ctypes.POINTER(_text)
_int64s = ctypes.POINTER(_int64)

_open = function("fk_model_open", ctypes.c_int, _text, _text, ctypes.POINTER(_pointer))
_close = function("fk_model_close", None, _pointer)
_info = function("fk_model_info", _text, _pointer)
_tokenizer_of = function("fk_model_tokenizer", _pointer, _pointer)
_weight_count = function("fk_model_weight_count", _size, _pointer)
_weight = function(
    "fk_model_weight", ctypes.c_int, _pointer, _size, _texts, _texts, _int64s, _int64s
)
_read_weight = function("fk_model_read_weight", ctypes.c_int, _pointer, _size, _pointer)
_tokenizer_open = function("fk_tokenizer_open", ctypes.c_int, _text, ctypes.POINTER(_pointer))
_tokenizer_close = function("fk_tokenizer_close", None, _pointer)
_tokenizer_info = function("fk_tokenizer_info", _text, _pointer)
_encode = function(
    "fk_tokenizer_encode",
    *(ctypes.c_int, _pointer, _text, _size, _flag, _flag, _pointer, _size, _sizes),
)
_decode = function(
    "fk_tokenizer_decode",
    *(ctypes.c_int, _pointer, _pointer, _size, _flag, _pointer, _size, _sizes),
)
_chat = function(
    "fk_tokenizer_chat",
    *(ctypes.c_int, _pointer, _pointer, _pointer, _size, _flag),
    *(_pointer, _size, _sizes, _pointer, _size, _sizes),
)
_find_token = function("fk_tokenizer_find", _flag, _pointer, _text)
_find = function("fk_find_model", ctypes.c_int, _text, _pointer, _size, _sizes)
_dequantize = function("fk_dequantize", ctypes.c_int, _text, _pointer, _size, _int64, _pointer)


def find(call: str, path_or_name) -> bytes:
    """The file that a path or a known model's name stands for; of "", the built-in model's: ""."""
    name = _arguments.path(call, "path_or_name", path_or_name)
    count = _size()
    check(_find(name, None, 0, count))
    path = ctypes.create_string_buffer(count.value + 1)
    check(_find(name, path, count.value, count))
    return path.value


class Tokenizer(Owner):
    """Text to token ids and back, as Hugging Face's tokenizers do it for the same model.

    `Tokenizer(path)` takes every file that `flashkernel.load` takes, a known name or "" (the
    built-in model), and a tokenizer's own file: tokenizer.json, llama2.c's tokenizer.bin. Threads
    may share one."""

    __module__ = "flashkernel"
    _instead = "open it again where it is needed: flashkernel.Tokenizer(path)"

    def __init__(self, path="") -> None:
        pointer = _pointer()
        check(_tokenizer_open(find("Tokenizer", path), ctypes.byref(pointer)))
        self._use(Handle(pointer.value, _tokenizer_close))

    @classmethod
    def _of(cls, model: Handle) -> Tokenizer | None:
        """A model's own, which is there as long as the model's files are."""
        pointer = _tokenizer_of(model)
        if not pointer:
            return None
        self = cls.__new__(cls)
        self._use(Handle(pointer, within=model))
        return self

    def _use(self, handle: Handle) -> None:
        self._handle = handle
        info = json.loads(_tokenizer_info(handle))
        self.bos: int | None = info["bos"] if info["bos"] >= 0 else None
        self.eos: list[int] = info["eos"]
        self._vocab_size: int = info["size"]
        self.chat_format: str | None = info["chat_format"] or None
        self.chat_template: str | None = info["chat_template"] or None

    @property
    def vocab_size(self) -> int:
        """How many ids there are, special tokens included."""
        return self._vocab_size

    @property
    def size(self) -> int:
        """The older name of vocab_size."""
        return self._vocab_size

    def __len__(self) -> int:
        return self._vocab_size

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        parse_special: bool = True,
        add_special: bool | None = None,
    ) -> list[int]:
        """The ids of a text. add_special_tokens: with what the model puts around every text.
        parse_special: "<|im_end|>" in the text is that token. add_special: the older name of
        add_special_tokens."""
        if not isinstance(text, str):
            raise Error(f"encode: text: expected a text, got {text!r}")
        raw = text.encode("utf-8", "replace")
        around = add_special_tokens if add_special is None else add_special
        flags = int(bool(around)), int(bool(parse_special))
        count = _size()
        ids = np.empty(len(raw) + 16, np.int32)
        while True:
            check(_encode(self._handle, raw, len(raw), *flags, ids.ctypes.data, ids.size, count))
            if count.value <= ids.size:
                return ids[: count.value].tolist()
            ids = np.empty(count.value, np.int32)

    def decode(
        self,
        ids: Iterable[int] | np.ndarray[Any, Any],
        skip_special_tokens: bool = True,
        *,
        skip_special: bool | None = None,
    ) -> str:
        """The text of ids; bytes that form no UTF-8 come out as U+FFFD. skip_special: the older
        name of skip_special_tokens."""
        array = _arguments.ids("decode", "ids", ids)
        skip = skip_special_tokens if skip_special is None else skip_special
        call = (self._handle, array.ctypes.data, array.size, int(bool(skip)))
        count = _size()
        check(_decode(*call, None, 0, count))
        text = ctypes.create_string_buffer(count.value + 1)
        check(_decode(*call, text, count.value, count))
        return _text_of(text.raw[: count.value])

    def _run_chat(self, messages, prompt) -> tuple[list[int], str]:
        messages = list(messages)
        for m in messages:
            parts = [m.get(key) for key in ("role", "content")] if isinstance(m, dict) else []
            if not parts or not all(isinstance(part, str) for part in parts):
                raise Error(f"chat: messages: expected a text as role and as content, got {m!r}")
        roles = [m["role"].encode("utf-8", "replace") for m in messages]
        contents = [m["content"].encode("utf-8", "replace") for m in messages]
        if any(b"\0" in c for c in roles + contents):
            raise Error("chat: messages: expected text without null characters")
        n = len(messages)
        arrays = (_text * n)(*roles), (_text * n)(*contents)
        call = (self._handle, *arrays, n, int(bool(prompt)))
        id_count, text_count = _size(), _size()
        check(_chat(*call, None, 0, id_count, None, 0, text_count))
        ids = np.empty(id_count.value, np.int32)
        text = ctypes.create_string_buffer(text_count.value + 1)
        check(_chat(*call, ids.ctypes.data, ids.size, id_count, text, text_count.value, text_count))
        return ids.tolist(), _text_of(text.raw[: text_count.value])

    def encode_chat(self, messages: list[dict[str, str]], *, prompt: bool = True) -> list[int]:
        """The ids of a conversation ([{"role": "user", "content": "..."}, ...]) in the model's
        own format; with `prompt`, up to where the assistant speaks next. Contents never become
        special tokens."""
        return self._run_chat(messages, prompt)[0]

    def format_chat(self, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
        """The same as text."""
        return self._run_chat(messages, prompt)[1]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the file."""
        found = _find_token(self._handle, _arguments.text("token_id", "token", token))
        return found if found >= 0 else None


class ModelFile(Owner):
    """A model's files, mapped: its configuration, its tokenizer and its weights."""

    _instead = "load it again where it is needed: flashkernel.load(path)"

    def __init__(self, path, tokenizer=None) -> None:
        pointer = _pointer()
        name = None if tokenizer is None else _arguments.path("load", "tokenizer", tokenizer)
        check(_open(_arguments.path("load", "path", path), name, ctypes.byref(pointer)))
        # The tokenizer holds this, too: the files stay until neither it nor the model is there.
        self._handle = Handle(pointer.value, _close)
        self.config: dict[str, Any] = json.loads(_info(self._handle))
        self.tokenizer = Tokenizer._of(self._handle)

    def _weights(self) -> list[tuple[str, str, int, int]]:
        """Name, type, rows and columns of each, in the library's order."""
        found = []
        for i in range(_weight_count(self._handle)):
            name, kind = _text(), _text()
            rows, columns = _int64(), _int64()
            check(_weight(self._handle, i, name, kind, rows, columns))
            found.append((_text_of(name.value), _text_of(kind.value), rows.value, columns.value))
        return found

    def weights(self) -> dict[str, tuple[str, int, int]]:
        """Each weight's type and shape, by name."""
        return {name: (kind, rows, columns) for name, kind, rows, columns in self._weights()}

    def read_weight(self, name: str) -> np.ndarray[Any, Any]:
        """A weight as float32, (rows, columns)."""
        for i, (known, _, rows, columns) in enumerate(self._weights()):
            if known == name:
                out = np.empty((rows, columns), np.float32)
                check(_read_weight(self._handle, i, out.ctypes.data))
                return out
        raise Error(f"weight: expected the name of one, got {name!r}")


def _text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def dequantize(kind: str, data: np.ndarray, count: int) -> np.ndarray:
    """`count` weights of a GGUF type ("Q4_K") out of its bytes, as float32."""
    data = np.ascontiguousarray(data).view(np.uint8)
    count = _arguments.integer("dequantize", "count", count, 0)
    out = np.empty(count, np.float32)
    name = _arguments.text("dequantize", "kind", kind)
    check(_dequantize(name, data.ctypes.data, data.nbytes, count, out.ctypes.data))
    return out

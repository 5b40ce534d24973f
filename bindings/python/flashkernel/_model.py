"""Model files and tokenizers, through the library's C functions (flashkernel/model.h)."""

import ctypes
import json
import os

import numpy as np

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
_find = function("fk_tokenizer_find", _flag, _pointer, _text)
_dequantize = function("fk_dequantize", ctypes.c_int, _text, _pointer, _size, _int64, _pointer)


def _path(path) -> bytes:
    return os.fsencode(os.fspath(path))


def _as_ids(ids) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise Error(f"decode: ids: expected a list of integers, got {type(ids).__name__}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise Error(f"decode: ids: expected token ids, got {array.max()}")
    return np.ascontiguousarray(array, np.int32)


class Tokenizer:
    """Text to token ids and back, as Hugging Face's tokenizers do it for the same model.

    `Tokenizer(path)` opens a tokenizer.json (or its folder), a .gguf or llama2.c's tokenizer.bin.
    """

    def __init__(self, path):
        handle = _pointer()
        self._owned = None
        check(_tokenizer_open(_path(path), ctypes.byref(handle)))
        self._owned = handle.value
        self._use(handle.value)

    @classmethod
    def of(cls, handle: int, owner) -> "Tokenizer":
        """A model's own; `owner` keeps its files open."""
        self = cls.__new__(cls)
        self._owned, self._owner = None, owner
        self._use(handle)
        return self

    def _use(self, handle: int) -> None:
        self._handle = handle
        info = json.loads(_tokenizer_info(handle))
        self.bos: int | None = info["bos"] if info["bos"] >= 0 else None
        self.eos: list[int] = info["eos"]
        self.size: int = info["size"]
        self.chat_format: str | None = info["chat_format"] or None
        self.chat_template: str | None = info["chat_template"] or None

    def __del__(self):
        # At exit the module's names may be gone already.
        if getattr(self, "_owned", None) and _tokenizer_close is not None:
            _tokenizer_close(self._owned)

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, *, add_special=True, parse_special=True) -> list[int]:
        """The ids of a text. add_special: with what the model puts around every text.
        parse_special: "<|im_end|>" in the text is that token."""
        raw = text.encode("utf-8", "replace")
        flags = int(add_special), int(parse_special)
        count = _size()
        ids = np.empty(len(raw) + 16, np.int32)
        while True:
            check(_encode(self._handle, raw, len(raw), *flags, ids.ctypes.data, ids.size, count))
            if count.value <= ids.size:
                return ids[: count.value].tolist()
            ids = np.empty(count.value, np.int32)

    def decode(self, ids, *, skip_special=True) -> str:
        """The text of ids; bytes that form no UTF-8 come out as U+FFFD."""
        array = _as_ids(ids)
        call = (self._handle, array.ctypes.data, array.size, int(skip_special))
        count = _size()
        check(_decode(*call, None, 0, count))
        text = ctypes.create_string_buffer(count.value + 1)
        check(_decode(*call, text, count.value, count))
        return text.raw[: count.value].decode()

    def _run_chat(self, messages, prompt) -> tuple[list[int], str]:
        for m in messages:
            if not all(isinstance(m.get(key), str) for key in ("role", "content")):
                raise Error(f"chat: messages: expected a text as role and as content, got {m!r}")
        roles = [m["role"].encode() for m in messages]
        contents = [m["content"].encode("utf-8", "replace") for m in messages]
        if any(b"\0" in c for c in roles + contents):
            raise Error("chat: messages: expected text without null characters")
        n = len(messages)
        arrays = (_text * n)(*roles), (_text * n)(*contents)
        call = (self._handle, *arrays, n, int(prompt))
        id_count, text_count = _size(), _size()
        check(_chat(*call, None, 0, id_count, None, 0, text_count))
        ids = np.empty(id_count.value, np.int32)
        text = ctypes.create_string_buffer(text_count.value + 1)
        check(_chat(*call, ids.ctypes.data, ids.size, id_count, text, text_count.value, text_count))
        return ids.tolist(), text.raw[: text_count.value].decode()

    def encode_chat(self, messages: list[dict[str, str]], *, prompt=True) -> list[int]:
        """The ids of a conversation ([{"role": "user", "content": "..."}, ...]) in the model's
        own format; with `prompt`, up to where the assistant speaks next. Contents never become
        special tokens."""
        return self._run_chat(messages, prompt)[0]

    def format_chat(self, messages: list[dict[str, str]], *, prompt=True) -> str:
        """The same as text."""
        return self._run_chat(messages, prompt)[1]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the file."""
        found = _find(self._handle, token.encode())
        return found if found >= 0 else None


class _Files:
    """Closes a model's files once neither the model nor its tokenizer is there any more."""

    def __init__(self, handle: int):
        self.handle = handle

    def __del__(self):
        # At exit the module's names may be gone already.
        if _close is not None:
            _close(self.handle)


class ModelFile:
    """A model's files, mapped: its configuration, its tokenizer and its weights."""

    def __init__(self, path, tokenizer=None):
        handle = _pointer()
        name = None if tokenizer is None else _path(tokenizer)
        check(_open(_path(path), name, ctypes.byref(handle)))
        self._handle, self._files = handle.value, _Files(handle.value)
        self.config: dict = json.loads(_info(self._handle))
        own = _tokenizer_of(self._handle)
        self.tokenizer = Tokenizer.of(own, self._files) if own else None

    def weights(self) -> dict[str, tuple[str, int, int]]:
        """Each weight's type and shape, by name."""
        found = {}
        for i in range(_weight_count(self._handle)):
            name, kind = _text(), _text()
            rows, columns = ctypes.c_int64(), ctypes.c_int64()
            check(_weight(self._handle, i, name, kind, rows, columns))
            found[name.value.decode()] = (kind.value.decode(), rows.value, columns.value)
        return found

    def read_weight(self, name: str) -> np.ndarray:
        """A weight as float32, (rows, columns)."""
        weights = self.weights()
        if name not in weights:
            raise Error(f"weight: expected the name of one, got {name!r}")
        _, rows, columns = weights[name]
        out = np.empty((rows, columns), np.float32)
        check(_read_weight(self._handle, list(weights).index(name), out.ctypes.data))
        return out


def dequantize(kind: str, data: np.ndarray, count: int) -> np.ndarray:
    """`count` weights of a GGUF type ("Q4_K") out of its bytes, as float32."""
    data = np.ascontiguousarray(data).view(np.uint8)
    out = np.empty(count, np.float32)
    check(_dequantize(kind.encode(), data.ctypes.data, data.nbytes, count, out.ctypes.data))
    return out

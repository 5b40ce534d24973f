"""Models that write text: what `flashkernel.load` returns."""

import ctypes
import json
import operator
import os
import secrets
import threading
from collections.abc import Iterator

import numpy as np

from ._library import Error, check, function
from ._model import ModelFile

_P, _N, _S = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_i32, _i64, _double = ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_size = ctypes.POINTER(_N)

_find = function("fk_find_model", ctypes.c_int, _S, _P, _N, _size)
_open = function("fk_engine_open", ctypes.c_int, _P, _i64, _S, _S, ctypes.POINTER(_P))
_close = function("fk_engine_close", None, _P)
_info = function("fk_engine_info", _S, _P)
_logits = function("fk_engine_logits", ctypes.c_int, _P, _P, _N, _P)
_step = function("fk_engine_step", ctypes.c_int, _P, _i32, _P)
_begin = function("fk_engine_begin", ctypes.c_int, _P, _P, _N, _P)
_next = function("fk_engine_next", ctypes.c_int, _P, ctypes.POINTER(_P), _size, _P)
_result = function("fk_engine_result", _S, _P)


class _Sampling(ctypes.Structure):
    _fields_ = [
        ("max_tokens", _i64),
        ("temperature", _double),
        ("top_k", _i64),
        ("top_p", _double),
        ("min_p", _double),
        ("repetition_penalty", _double),
        ("seed", ctypes.c_uint64),
        ("stop", ctypes.POINTER(_S)),
        ("stop_count", _N),
        ("ignore_eos", _i32),
        ("reserved", _i32),
    ]


def _ids(call: str, argument: str, values, expected="a list of integers") -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise Error(f"{call}: {argument}: expected {expected}, got {type(values).__name__}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise Error(f"{call}: {argument}: expected token ids, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _number(call: str, argument: str, kind, value, least=-(2**63), below=2**63):
    """A value as a float, or as an integer (kind operator.index) that a C integer holds."""
    try:
        number = kind(value)
        if kind is float or least <= number < below:
            return number
        expected = f"{least} or more" if number < least else f"at most {below - 1}"
    except (TypeError, ValueError):
        expected = "a number" if kind is float else "an integer"
    raise Error(f"{call}: {argument}: expected {expected}, got {value!r}")


class Model(ModelFile):
    """A model that is ready to run on the CPU. Calls from several threads take turns; a call ends
    the stream that was begun before it."""

    def __init__(self, path, tokenizer=None, context=0, cache=None, quantize=None):
        self._engine = _P()
        self._turn, self._stream = threading.RLock(), None
        context = _number("load", "context", operator.index, context)
        super().__init__(path, tokenizer)
        cache, quantize = _bytes("cache", cache), _bytes("quantize", quantize)
        check(_open(self._handle, context, cache, quantize, self._engine))
        self.config["model_context"] = self.config["context"]
        self.config |= json.loads(_info(self._engine))

    def __del__(self):
        # At exit the module's names may be gone already.
        if getattr(self, "_engine", None) and _close is not None:
            _close(self._engine)

    def __repr__(self) -> str:
        c = self.config
        return f"<flashkernel.Model {c['name'] or c['path']}: {c['family']}, {c['weights']}>"

    def logits(self, token_ids) -> np.ndarray:
        """The logits after each token of a text: float32 (len(token_ids), vocab)."""
        ids = _ids("logits", "token_ids", token_ids)
        out = np.empty((ids.size, self.config["vocab"]), np.float32)
        with self._turn:
            self._stream = None
            check(_logits(self._engine, ids.ctypes.data, ids.size, out.ctypes.data))
        return out

    def step(self, token_id: int) -> np.ndarray:
        """One more token after `logits` or `step`: its logits, float32 (vocab)."""
        token = _number("step", "token_id", operator.index, token_id, 0, 2**31)
        out = np.empty(self.config["vocab"], np.float32)
        with self._turn:
            self._stream = None
            check(_step(self._engine, token, out.ctypes.data))
        return out

    def generate(
        self,
        prompt="",
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        stream: bool = False,
        *,
        ignore_eos: bool = False,
    ) -> str | Iterator[str]:
        """Continues a prompt: a text, a list of token ids, or a conversation (a list of messages
        with "role" and "content"). Returns the new text; with `stream`, an iterator over its
        pieces as they come. temperature=0 always takes the likeliest token. The same seed gives
        the same text, whatever the number of threads; seed=None takes a new one each time.
        `last_result` then says how it ended and how long it took."""
        index, name = operator.index, "generate"
        seed = secrets.randbits(32) if seed is None else seed
        sampling = _Sampling(
            max_tokens=_number(name, "max_tokens", index, max_tokens),
            temperature=_number(name, "temperature", float, temperature),
            top_k=_number(name, "top_k", index, top_k),
            top_p=_number(name, "top_p", float, top_p),
            min_p=_number(name, "min_p", float, min_p),
            repetition_penalty=_number(name, "repetition_penalty", float, repetition_penalty),
            seed=_number(name, "seed", index, seed, 0, 2**64),
            ignore_eos=bool(ignore_eos),
        )
        stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            raise Error(f"{name}: stop: expected a text or a list of texts, got {stop!r}")
        ids = self._prompt_ids(prompt)
        with self._turn:
            pieces = self._pieces(ids, sampling, stop)
            return pieces if stream else "".join(pieces)

    @property
    def last_result(self) -> dict:
        """Of the last `generate`: text, tokens, end, prompt_tokens, prompt_seconds, seconds."""
        return json.loads(_result(self._engine))

    def _prompt_ids(self, prompt) -> np.ndarray:
        if self.tokenizer is None:
            raise Error(f"generate: the model has no tokenizer: {self.config['tokenizer_error']}")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if not ids:  # what begins a text, or ends the one before it
                first = self.tokenizer.bos
                ids = [first] if first is not None else self.tokenizer.eos[:1]
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            ids = self.tokenizer.encode_chat(prompt)
        else:
            ids = prompt
        expected = "a text, a list of token ids or a list of messages"
        return _ids("generate", "prompt", ids, expected)

    def _pieces(self, ids: np.ndarray, sampling: _Sampling, stop: list[str]) -> Iterator[str]:
        stops = (_S * len(stop))(*(s.encode() for s in stop))
        sampling.stop, sampling.stop_count = stops, len(stop)
        self._stream = own = object()
        check(_begin(self._engine, ids.ctypes.data, ids.size, ctypes.byref(sampling)))

        def pieces():
            text, count, more = _P(), _N(), _i32(1)
            while more.value:
                with self._turn:
                    if self._stream is not own:
                        raise Error("generate: the stream was ended by another call of the model")
                    check(_next(self._engine, text, count, ctypes.byref(more)))
                    piece = ctypes.string_at(text, count.value).decode()
                if piece:
                    yield piece

        return pieces()


def _bytes(argument: str, text: str | None) -> bytes | None:
    if text is not None and not isinstance(text, str):
        raise Error(f"load: {argument}: expected a text, got {text!r}")
    return None if text is None else text.encode()


def load(path_or_name, tokenizer, context, cache, quantize) -> Model:
    for argument, path in (("path_or_name", path_or_name), ("tokenizer", tokenizer or "")):
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise Error(f"load: {argument}: expected a path, got {path!r}")
    name = os.fsencode(path_or_name)
    count = _N()
    check(_find(name, None, 0, count))
    path = ctypes.create_string_buffer(count.value + 1)
    check(_find(name, path, count.value, count))
    return Model(os.fsdecode(path.value), tokenizer, context, cache, quantize)

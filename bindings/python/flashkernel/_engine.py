"""Models that write text: what `flashkernel.load` returns."""

import ctypes
import json
import os
import secrets
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


def _ids(call: str, argument: str, values) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise Error(f"{call}: {argument}: expected a list of integers, got {type(values).__name__}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise Error(f"{call}: {argument}: expected token ids, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


class Model(ModelFile):
    """A model that is ready to run on the CPU. One call at a time."""

    def __init__(self, path, tokenizer=None, context=0, cache=None, quantize=None):
        self._engine = _P()
        super().__init__(path, tokenizer)
        check(_open(self._handle, context, _bytes(cache), _bytes(quantize), self._engine))
        self.config["model_context"] = self.config["context"]
        self.config |= json.loads(_info(self._engine))

    def __del__(self):
        # At exit the module's names may be gone already.
        if getattr(self, "_engine", None) and _close is not None:
            _close(self._engine)
        super().__del__()

    def __repr__(self) -> str:
        c = self.config
        return f"<flashkernel.Model {c['name'] or c['path']}: {c['family']}, {c['weights']}>"

    def logits(self, token_ids) -> np.ndarray:
        """The logits after each token of a text: float32 (len(token_ids), vocab)."""
        ids = _ids("logits", "token_ids", token_ids)
        out = np.empty((ids.size, self.config["vocab"]), np.float32)
        check(_logits(self._engine, ids.ctypes.data, ids.size, out.ctypes.data))
        return out

    def step(self, token_id: int) -> np.ndarray:
        """One more token after `logits` or `step`: its logits, float32 (vocab)."""
        out = np.empty(self.config["vocab"], np.float32)
        check(_step(self._engine, token_id, out.ctypes.data))
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
        pieces = self._pieces(
            self._prompt_ids(prompt),
            _Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seed=secrets.randbits(32) if seed is None else seed,
                ignore_eos=int(ignore_eos),
            ),
            [stop] if isinstance(stop, str) else list(stop or ()),
        )
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
        elif len(prompt) and isinstance(prompt[0], dict):
            ids = self.tokenizer.encode_chat(prompt)
        else:
            ids = prompt
        return _ids("generate", "prompt", ids)

    def _pieces(self, ids: np.ndarray, sampling: _Sampling, stop: list[str]) -> Iterator[str]:
        stops = (_S * len(stop))(*(s.encode() for s in stop))
        sampling.stop, sampling.stop_count = stops, len(stop)
        check(_begin(self._engine, ids.ctypes.data, ids.size, ctypes.byref(sampling)))

        def pieces():
            text, count, more = _P(), _N(), _i32(1)
            while more.value:
                check(_next(self._engine, text, count, ctypes.byref(more)))
                if count.value:
                    yield ctypes.string_at(text, count.value).decode()

        return pieces()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def load(path_or_name, tokenizer, context, cache, quantize) -> Model:
    name = os.fsencode(path_or_name)
    count = _N()
    check(_find(name, None, 0, count))
    path = ctypes.create_string_buffer(count.value + 1)
    check(_find(name, path, count.value, count))
    return Model(os.fsdecode(path.value), tokenizer, context, cache, quantize)

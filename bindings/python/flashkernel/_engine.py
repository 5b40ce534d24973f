"""Models that write text: what `flashkernel.load` returns."""

from __future__ import annotations

import ctypes
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np

from . import _arguments
from ._handle import Handle, Turns
from ._library import Error, check, function
from ._model import ModelFile, find
from ._text import printable

_P, _N, _S = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_i32, _i64, _double = ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_size = ctypes.POINTER(_N)

_open = function("fk_engine_open", ctypes.c_int, _P, _i64, _S, _S, ctypes.POINTER(_P))
_close = function("fk_engine_close", None, _P)
_info = function("fk_engine_info", _S, _P)
_vocab = function("fk_engine_vocab", _i64, _P)
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


Prompt = str | Sequence[int] | Sequence[dict[str, str]] | np.ndarray[Any, Any]


class Model(ModelFile):
    """A model that is ready to run on the CPU. Calls from several threads take turns; a call ends
    the stream that was begun before it. `config` is what its files say, for reading: nothing is
    computed from it."""

    __module__ = "flashkernel"

    def __init__(self, path, tokenizer=None, context=0, cache=None, quantize=None) -> None:
        self._turns, self._stream = Turns(), object()
        context = _arguments.integer("load", "context", context)
        names = [
            value if value is None else _arguments.text("load", argument, value)
            for argument, value in (("cache", cache), ("quantize", quantize))
        ]
        super().__init__(path, tokenizer)
        engine = _P()
        check(_open(self._handle, context, *names, ctypes.byref(engine)))
        self._engine = Handle(engine.value, _close, within=self._handle)
        self.config["model_context"] = self.config["context"]
        self.config |= json.loads(_info(self._engine))

    def __repr__(self) -> str:
        c = self.config
        name = c.get("name") or c.get("path")
        about = f"{name}: {c.get('family')}, {c.get('weights')}"
        return f"<flashkernel.Model {printable(about)}>"

    def logits(self, token_ids: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits after each token of a text: float32 (len(token_ids), vocab)."""
        ids = _arguments.ids("logits", "token_ids", token_ids)
        out = np.empty((ids.size, _vocab(self._engine)), np.float32)
        self._turns.take("logits", self._run, _logits, ids.ctypes.data, ids.size, out.ctypes.data)
        return out

    def step(self, token_id: int) -> np.ndarray[Any, Any]:
        """One more token after `logits` or `step`: its logits, float32 (vocab)."""
        token = _arguments.integer("step", "token_id", token_id, 0, 2**31)
        out = np.empty(_vocab(self._engine), np.float32)
        self._turns.take("step", self._run, _step, token, out.ctypes.data)
        return out

    @overload
    def generate(
        self,
        prompt: Prompt = "",
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        stream: Literal[False] = False,
        *,
        ignore_eos: bool = False,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: Prompt = "",
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        *,
        stream: Literal[True],
        ignore_eos: bool = False,
    ) -> Iterator[str]: ...

    def generate(
        self,
        prompt: Prompt = "",
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
        integer, number, name = _arguments.integer, _arguments.number, "generate"
        seed = secrets.randbits(32) if seed is None else seed
        stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            raise Error(f"{name}: stop: expected a text or a list of texts, got {stop!r}")
        stops = (_S * len(stop))(*(_arguments.text(name, "stop", s) for s in stop))
        sampling = _Sampling(
            max_tokens=integer(name, "max_tokens", max_tokens),
            temperature=number(name, "temperature", float, temperature),
            top_k=integer(name, "top_k", top_k),
            top_p=number(name, "top_p", float, top_p),
            min_p=number(name, "min_p", float, min_p),
            repetition_penalty=number(name, "repetition_penalty", float, repetition_penalty),
            seed=integer(name, "seed", seed, 0, 2**64),
            stop=stops,
            stop_count=len(stops),
            ignore_eos=bool(ignore_eos),
        )
        ids = self._prompt_ids(prompt)
        if not stream:
            return self._turns.take(name, self._write, ids, sampling)
        own = self._turns.take(name, self._begin, ids, sampling)
        return self._pieces(own)

    @property
    def last_result(self) -> dict[str, Any]:
        """The last `generate`: text, tokens, end, prompt_tokens, prompt_seconds, seconds."""
        said = self._turns.take("last_result", _result, self._engine)
        if not said:
            raise Error("last_result: the model has no tokenizer, and so has written no text")
        return json.loads(said)

    def _prompt_ids(self, prompt) -> np.ndarray:
        if self.tokenizer is None:
            error = self.config.get("tokenizer_error")
            raise Error(f"generate: the model has no tokenizer: {error}")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if not ids:  # what begins a text, or ends the one before it
                first = self.tokenizer.bos
                ids = [first] if first is not None else self.tokenizer.eos[:1]
            if not ids:
                raise Error(
                    "generate: prompt: expected a text: the model has no token to begin one with"
                )
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            ids = self.tokenizer.encode_chat(prompt)
        else:
            ids = prompt
        expected = "a text, a list of token ids or a list of messages"
        return _arguments.ids("generate", "prompt", ids, expected)

    # --- in a turn ------------------------------------------------------------------------------

    def _run(self, function, *arguments) -> None:
        self._stream = object()
        check(function(self._engine, *arguments))

    def _begin(self, ids: np.ndarray, sampling: _Sampling) -> object:
        """Runs the prompt; what comes back names the stream that has begun."""
        self._run(_begin, ids.ctypes.data, ids.size, ctypes.byref(sampling))
        return self._stream

    def _next(self, own: object) -> tuple[str, bool]:
        """The next piece of a stream, and whether there are more."""
        if self._stream is not own:
            raise Error("generate: the stream was ended by another call of the model")
        text, count, more = _P(), _N(), _i32()
        pointers = ctypes.byref(text), ctypes.byref(count), ctypes.byref(more)
        check(_next(self._engine, *pointers))
        piece = ctypes.string_at(text, count.value) if count.value else b""
        return piece.decode(errors="replace"), bool(more.value)

    def _write(self, ids: np.ndarray, sampling: _Sampling) -> str:
        own = self._begin(ids, sampling)
        pieces, more = [], True
        while more:
            piece, more = self._next(own)
            pieces.append(piece)
        return "".join(pieces)

    # --- between turns --------------------------------------------------------------------------

    def _pieces(self, own: object) -> Iterator[str]:
        more = True
        while more:
            piece, more = self._turns.take("generate", self._next, own)
            if piece:
                yield piece


def load(path_or_name, tokenizer, context, cache, quantize) -> Model:
    path = find("load", path_or_name)
    if tokenizer is not None:
        tokenizer = _arguments.path("load", "tokenizer", tokenizer) or None
    return Model(path, tokenizer, context, cache, quantize)

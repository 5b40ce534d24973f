"""What stands behind models and tokenizers in Python: who frees it, and that no copy, thread, fork,
signal or destructor reaches it at the wrong time. What could crash runs in a process of its own."""

import concurrent.futures
import contextlib
import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import flashkernel as fk
import tiny_models
from flashkernel import _arguments
from flashkernel._handle import Handle
from flashkernel._model import ModelFile


@pytest.fixture
def tiny(tmp_path):
    return fk.load(tiny_models.llama2c(tmp_path))


def run_script(source: str) -> str:
    """What a script prints. Nothing may be on stderr, where Python says what destructors raise."""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.strip()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_owners_refuse_copies(tiny, tmp_path, duplicate):
    owners = [tiny, tiny.tokenizer, fk.Tokenizer(), ModelFile(tmp_path / "model.bin")]
    for owner in owners:
        with pytest.raises(fk.Error, match="cannot be copied or pickled, .*; (open|load) it again"):
            duplicate(owner)
    assert tiny.generate("", max_tokens=3, seed=0) == tiny.generate("", max_tokens=3, seed=0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_handles_refuse_copies(tiny, duplicate):
    """A debugger or a cache that goes through an object's attributes meets them alone."""
    held = [v for o in (tiny, tiny.tokenizer) for v in vars(o).values() if isinstance(v, Handle)]
    assert len(held) == 3
    for handle in held:
        with pytest.raises(fk.Error, match="Handle: cannot be copied or pickled"):
            duplicate(handle)


def test_sizes_do_not_come_from_the_configuration(tiny):
    ids = list(range(10))
    expected = tiny.logits(ids)
    for vocab in (1, 0, -1, "many", 10**9):
        tiny.config["vocab"] = vocab
        assert tiny.logits(ids).shape == expected.shape == (10, 259)
        assert tiny.step(1).shape == (259,)
    tiny.config.clear()
    assert tiny.logits(ids).shape == expected.shape
    assert repr(tiny).startswith("<flashkernel.Model ")


def test_ids_are_the_librarys_own_while_it_runs():
    """An array that another thread changes after its ids were checked would be read again."""
    ids = np.arange(5, dtype=np.int32)
    assert not np.shares_memory(_arguments.ids("logits", "token_ids", ids), ids)


def test_last_result_while_others_write(tiny):
    """Every result is that of one text at one moment, never of two."""
    options = {"max_tokens": 400, "top_k": 0, "ignore_eos": True}
    whole = []
    for seed in range(2):
        tiny.generate("abc", seed=seed, **options)
        whole.append(tiny.last_result)
    stop = threading.Event()

    def write(seed):
        while not stop.is_set():
            with contextlib.suppress(fk.Error):  # the other thread has begun another
                for _ in tiny.generate("abc", seed=seed, stream=True, **options):
                    pass

    def read():
        for _ in range(1500):
            said = tiny.last_result
            tokens, text = said["tokens"], said["text"]
            of = [w for w in whole if w["tokens"][: len(tokens)] == tokens]
            assert any(w["text"].startswith(text) for w in of)
        return True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            writers = [pool.submit(write, seed) for seed in range(2)]
            readers = [pool.submit(read) for _ in range(4)]
            concurrent.futures.wait(readers)
            stop.set()
            assert all(call.result() for call in readers) and not any(w.result() for w in writers)
    finally:
        sys.setswitchinterval(before)


def test_every_call_from_every_thread(tiny):
    """Calls of all kinds at once, on one model and its tokenizer, give what they give alone."""
    ids, text = [1, 70, 80, 90], "any text, ä\0\x1b"
    tokens = tiny.tokenizer.encode(text)
    work = [
        (lambda: tiny.logits(ids).tobytes()),
        (lambda: tiny.generate("Hello", max_tokens=12, seed=5)),
        (lambda: tiny.tokenizer.encode(text)),
        (lambda: tiny.tokenizer.decode(tokens)),
        (lambda: tiny.read_weight("layers.0.q").tobytes()),
        (lambda: fk.Tokenizer().encode("The sea")),
        (lambda: len(tiny.weights())),
    ]
    expected = [call() for call in work]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [(i % len(work), pool.submit(work[i % len(work)])) for i in range(400)]
        assert all(call.result() == expected[i] for i, call in calls)


def test_signal_handler_does_not_get_into_a_call(tiny):
    """It would free the text that the interrupted call is about to read."""
    options = {"max_tokens": 300, "seed": 3}
    expected, outcomes = tiny.generate("Hello", **options), set()

    def handler(*_):
        try:
            tiny.generate("other", max_tokens=1)
            outcomes.add("ran")
        except fk.Error as error:
            outcomes.add(str(error).partition(",")[0])

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        texts = set()
        for _ in range(200):
            texts.add(tiny.generate("Hello", **options))
            if outcomes - {"ran"}:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert texts == {expected}
    assert "generate: the model is in the middle of a call of this thread" in outcomes


def test_stream_outlives_the_name_of_its_model(tmp_path):
    model = fk.load(tiny_models.llama2c(tmp_path))
    options = {"max_tokens": 50, "seed": 2}
    expected = model.generate("Hello", **options)
    stream = model.generate("Hello", **options, stream=True)
    first = next(stream)
    del model
    gc.collect()
    assert first + "".join(stream) == expected


def test_stream_that_is_closed_or_dropped(tiny):
    expected = tiny.generate("Hello", max_tokens=20, seed=2)
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream = tiny.generate("other", max_tokens=20, seed=1, stream=True)
        next(stream)
        leave(stream)
        del stream
        assert tiny.generate("Hello", max_tokens=20, seed=2) == expected


def test_failed_construction_leaves_nothing_to_free():
    assert run_script("""
import flashkernel as fk
for make in (lambda: fk.load("/nowhere"), lambda: fk.load(quantize="q3_k"),
             lambda: fk.load(context="long"), lambda: fk.Tokenizer("/")):
    try:
        make()
    except fk.Error:
        print("refused")
fk.Model.__new__(fk.Model), fk.Tokenizer.__new__(fk.Tokenizer)
""").split() == ["refused"] * 4  # fmt: skip


@pytest.mark.parametrize("first", ["model", "holder"])
def test_destructor_in_a_cycle(first):
    """Python may end the model before the object whose destructor uses it."""
    said = run_script(f"""
import gc
import flashkernel as fk
class Holder:
    def __del__(self):
        for call in (lambda: self.model.generate("a", max_tokens=1), lambda: self.model.step(1),
                     lambda: self.tokenizer.encode("a"), lambda: self.model.last_result,
                     lambda: self.model.weights()):
            try:
                call()
                print("ran")
            except fk.Error as error:
                print("refused")
gc.disable()
first = {first!r}
holder = None if first == "model" else Holder()
model = fk.load()
holder = holder or Holder()
holder.model, holder.tokenizer, holder.itself = model, model.tokenizer, holder
model.holder = holder
del holder, model
gc.collect()
""")
    assert len(said.split()) == 5 and set(said.split()) <= {"ran", "refused"}


def test_fork():
    """A model goes on in a process that was forked while nobody used it."""
    said = run_script("""
import os
import flashkernel as fk
model = fk.load()
expected = model.generate("The sea", max_tokens=10, seed=1)
child = os.fork()
if child == 0:
    os._exit(model.generate("The sea", max_tokens=10, seed=1) != expected)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert said == "0"


def test_fork_while_another_thread_writes():
    """The new process has the other thread's half-done call, but not the thread."""
    said = run_script("""
import os, signal, threading
import warnings; warnings.simplefilter("ignore")
import flashkernel as fk
model, begun, ended = fk.load(context=4000), threading.Event(), threading.Event()
def write():
    begun.set()
    while not ended.is_set():
        model.generate("The sea", max_tokens=3000)
thread = threading.Thread(target=write)
thread.start()
begun.wait()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            model.logits([1])
            os._exit(2)  # forked between two calls
        except fk.Error as error:
            os._exit(0 if "load the model again" in str(error) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 2:
        break
print(code, flush=True)
os._exit(0)
""")
    assert said == "0"

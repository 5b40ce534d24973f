"""Text: the stories model's golden text, the built-in model, sampling, stops, streams."""

import concurrent.futures
import weakref

import numpy as np
import pytest

import flashkernel as fk


@pytest.fixture(scope="module")
def builtin():
    return fk.load()


@pytest.fixture(scope="module")
def stories(data):
    return fk.load(data / "stories260K.bin", tokenizer=str(data / "tok512.bin"))


def test_golden_text(stories, data):
    golden = (data / "stories260K.greedy200.txt").read_text()
    assert stories.generate("", max_tokens=200, temperature=0).strip() == golden.strip()


@pytest.mark.parametrize("target", ["sse4", "avx2", "avx3"])
def test_golden_text_on_every_target(data, target):
    try:
        fk.set_cpu_target(target)
    except fk.Error:
        pytest.skip(f"this machine has no {target}")
    try:
        model = fk.load(data / "stories260K.bin", tokenizer=str(data / "tok512.bin"))
        golden = (data / "stories260K.greedy200.txt").read_text()
        assert model.generate("", max_tokens=200, temperature=0).strip() == golden.strip()
    finally:
        fk.set_cpu_target(None)


def test_same_seed_same_text(builtin):
    """Whatever the number of threads, and whatever was run before."""
    threads = fk.num_threads()
    texts = set()
    try:
        for n in (1, 2, 3, 5):
            fk.set_num_threads(n)
            texts.add(builtin.generate("ROMEO:", max_tokens=60, seed=4))
            builtin.generate("something else", max_tokens=3)
    finally:
        fk.set_num_threads(threads)
    assert len(texts) == 1
    assert builtin.generate("ROMEO:", max_tokens=60, seed=5) not in texts


def test_prompt_is_run_once(builtin):
    """A prompt that continues the last one gives what it gives to a fresh model."""
    first = builtin.generate("The sea", max_tokens=20, temperature=0)
    again = "The sea" + first
    assert builtin.generate(again, max_tokens=20, temperature=0) == fk.load().generate(
        again, max_tokens=20, temperature=0
    )
    builtin.generate(again + " and", max_tokens=1)
    assert builtin.last_result["prompt_tokens"] < len(builtin.tokenizer.encode(again))


def test_stream_joins_to_text(builtin):
    whole = builtin.generate("I saw", max_tokens=40, seed=1)
    pieces = list(builtin.generate("I saw", max_tokens=40, seed=1, stream=True))
    assert "".join(pieces) == whole
    assert len(pieces) > 10


def test_stop(builtin):
    whole = builtin.generate("I saw", max_tokens=60, temperature=0)
    stop = whole[20:26]
    text = builtin.generate("I saw", max_tokens=60, temperature=0, stop=[stop, "\x01"])
    assert text == whole[: whole.index(stop)]
    assert builtin.last_result["end"] == "stop"


def test_sampling_options(builtin):
    greedy = builtin.generate("He said", max_tokens=20, temperature=0)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert builtin.generate("He said", max_tokens=20, temperature=1.5, **options) == greedy
    penalised = builtin.generate("He said", max_tokens=60, temperature=0, repetition_penalty=1.5)
    assert penalised != builtin.generate("He said", max_tokens=60, temperature=0)


def test_logits_and_steps_agree(builtin):
    ids = builtin.tokenizer.encode("It was on a dreary night of November")
    everything = builtin.logits(ids)
    assert everything.shape == (len(ids), builtin.config["vocab"])
    builtin.logits(ids[:1])
    for i, token in enumerate(ids[1:], 1):
        np.testing.assert_allclose(builtin.step(token), everything[i], atol=2e-3, rtol=2e-3)


def test_context_ends(builtin):
    model = fk.load(context=40)
    text = model.generate("The", max_tokens=1000, seed=0)
    assert text and model.last_result["end"] == "context full"
    with pytest.raises(fk.Error, match="expected at most 40 tokens, as many as the context holds"):
        model.generate("word " * 60)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -1}, "temperature: expected 0 or more"),
        ({"top_p": 0}, "top_p: expected above 0"),
        ({"top_k": -1}, "top_k: expected 0 or more"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected more than 0"),
        ({"prompt": [99999]}, "token 0: expected an id below"),
        ({"prompt": []}, "generate: prompt: expected at least one token, got none"),
        ({"prompt": [0.5]}, "prompt: expected a text, a list of token ids or a list of messages"),
        ({"prompt": None}, "prompt: expected a text, a list .* messages, got NoneType"),
        ({"max_tokens": -1}, "max_tokens: expected 0 or more, got -1$"),
        ({"temperature": -0.5}, "temperature: expected 0 or more, got -0.5$"),
        ({"prompt": [{"role": "user"}]}, "messages: expected a text as role and as content"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
        ({"top_k": 1.5}, "top_k: expected an integer, got 1.5"),
        ({"seed": 2**64}, "seed: expected at most"),
        ({"seed": -1}, "seed: expected 0 or more, got -1"),
        ({"stop": [5]}, "stop: expected a text or a list of texts"),
    ],
)
def test_errors(builtin, arguments, message):
    with pytest.raises(fk.Error, match=message):
        builtin.generate(**arguments)


def test_token_that_no_integer_of_32_bits_holds(builtin):
    with pytest.raises(fk.Error, match="step: token_id: expected at most"):
        builtin.step(2**32)


@pytest.mark.parametrize("token", [99999, -1])
def test_decode_names_an_id_that_is_not_there(builtin, token):
    with pytest.raises(fk.Error, match=f"decode: id 1: expected 0 to .*, got {token}"):
        builtin.tokenizer.decode([5, token])


def test_threads_take_turns(builtin):
    expected = builtin.generate("The sea", max_tokens=40, temperature=0)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(builtin.generate, "The sea", max_tokens=40, temperature=0)
            for _ in range(12)
        ]
    assert {c.result() for c in calls} == {expected}


def test_another_call_ends_a_stream(builtin):
    for other in (lambda: builtin.generate("King", max_tokens=3), lambda: builtin.logits([1, 2])):
        stream = builtin.generate("The sea", max_tokens=40, stream=True)
        next(stream)
        other()
        with pytest.raises(fk.Error, match="the stream was ended by another call"):
            next(stream)


def test_models_are_freed_at_once():
    model = fk.load()
    gone, tokenizer = weakref.ref(model), model.tokenizer
    expected = tokenizer.encode("The sea")
    del model
    assert gone() is None
    assert tokenizer.encode("The sea") == expected


def test_load_errors(tmp_path):
    with pytest.raises(fk.Error, match="load: path_or_name: expected a path, got 5"):
        fk.load(5)
    with pytest.raises(fk.Error, match="load: context: expected an integer, got 'long'"):
        fk.load(context="long")
    with pytest.raises(fk.Error, match="no such file or folder, and no known model"):
        fk.load(tmp_path / "nothing")
    with pytest.raises(fk.Error, match="tokenizer: expected none for the built-in model"):
        fk.load(tokenizer=tmp_path / "nothing")
    with pytest.raises(fk.Error, match="context: expected 0 to 2147483648, got 4294967296"):
        fk.load(context=2**32)
    with pytest.raises(fk.Error, match="quantize: expected f16"):
        fk.load(quantize="q3_k")
    with pytest.raises(fk.Error, match="cache: expected auto, f16 or f32"):
        fk.load(cache="f8")

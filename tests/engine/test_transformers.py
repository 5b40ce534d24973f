"""Random small models made with Transformers: our logits and greedy tokens beside its own."""

import numpy as np
import pytest

import flashkernel as fk

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configs():
    t = transformers
    yield "llama", t.LlamaConfig(**SMALL, num_key_value_heads=2)
    yield "llama_tied", t.LlamaConfig(**SMALL, num_key_value_heads=6, tie_word_embeddings=True)
    yield "llama_bias", t.LlamaConfig(**SMALL, num_key_value_heads=1, attention_bias=True)
    yield "llama_scaled", t.LlamaConfig(**SMALL, num_key_value_heads=3, rope_parameters=LLAMA3)
    yield "mistral", t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=24)
    yield "qwen2", t.Qwen2Config(**SMALL, num_key_value_heads=2)
    yield "qwen3", t.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32)
    yield (
        "gpt2",
        t.GPT2Config(
            vocab_size=320,
            n_positions=256,
            n_embd=96,
            n_layer=3,
            n_head=6,
            bos_token_id=1,
            eos_token_id=2,
        ),
    )


@pytest.fixture(params=list(configs()), ids=lambda c: c[0])
def pair(request, tmp_path):
    """Transformers' model and ours, of the same weights."""
    torch.manual_seed(0)
    name, config = request.param
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too, well away from 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs.save_pretrained(tmp_path)
    return theirs, fk.load(tmp_path)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Two pools that spin would fight over the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits_of(model, ids) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("length", [1, 7, 100])
def test_prefill(pair, length):
    theirs, ours = pair
    ids = np.random.default_rng(length).integers(3, 320, length).tolist()
    np.testing.assert_allclose(ours.logits(ids), logits_of(theirs, ids), atol=1e-4, rtol=1e-4)


def test_decode(pair):
    """64 greedy tokens are the same, and so are the logits of each step."""
    theirs, ours = pair
    ids = [5, 17, 200, 31]
    logits, cache = ours.logits(ids)[-1], None
    for _ in range(64):
        with torch.no_grad():
            step = theirs(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        expected, cache = step.logits[0, -1].numpy(), step.past_key_values
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
        assert logits.argmax() == expected.argmax()
        ids = [int(expected.argmax())]
        logits = ours.step(ids[0])


def test_half_cache_and_threads(pair, tmp_path):
    """Keys and values in half precision stay near; threads change nothing at all."""
    theirs, ours = pair
    ids = np.random.default_rng(1).integers(3, 320, 90).tolist()
    threads = fk.num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            fk.set_num_threads(n)
            results.append(ours.logits(ids))
    finally:
        fk.set_num_threads(threads)
    assert all(np.array_equal(r, results[0]) for r in results)
    half = fk.load(ours.config["path"], cache="f16")
    np.testing.assert_allclose(half.logits(ids), results[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("quantize", ["f16", "bf16", "q8_0", "q5_1", "q4_1", "q4_0"])
def test_quantize(quantize, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"intermediate_size": 256}, num_key_value_heads=2)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = list(range(3, 40))
    expected = logits_of(theirs, ids)
    ours = fk.load(tmp_path, quantize=quantize)
    assert quantize.upper() in ours.config["weights"]
    error = np.abs(ours.logits(ids) - expected).max() / np.abs(expected).max()
    assert error < {"f16": 2e-3, "bf16": 2e-2, "q8_0": 3e-2}.get(quantize, 0.4)
    assert error > 1e-6

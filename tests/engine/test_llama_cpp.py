"""SmolLM2's greedy text beside llama.cpp's: the same, or parting where two tokens are near a tie.

Needs the model (`fk pull smollm2`) and llama.cpp's program in FK_LLAMA_COMPLETION."""

import os
import subprocess

import pytest

import flashkernel as fk
from flashkernel.pull import MODELS, cache_folder

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "The three laws of motion are",
    "def fibonacci(n):",
    "My favourite season is autumn because",
]
TOKENS = 48
# What int8 activations do to these logits, root mean square: 0.11 to 0.33 (src/engine/NOTES.md). A
# gap is a difference of two logits.
NOISE = 0.25 * 2**0.5


@pytest.fixture(scope="module")
def model():
    path = cache_folder() / MODELS["smollm2"].file
    if not path.exists():
        pytest.skip("no SmolLM2: `fk pull smollm2`")
    return fk.load(path)


def llama_text(prompt: str) -> str:
    program = os.environ.get("FK_LLAMA_COMPLETION")
    if not program:
        pytest.skip("FK_LLAMA_COMPLETION names no llama-completion")
    path = cache_folder() / MODELS["smollm2"].file
    options = ["-n", str(TOKENS), "--temp", "0", "-t", "2", "--no-display-prompt", "-no-cnv"]
    command = [program, "-m", path, "-p", prompt, *options, "--simple-io"]
    result = subprocess.run(command, capture_output=True, check=True, timeout=300)
    return result.stdout.decode(errors="ignore")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text(model, prompt):
    text = model.generate(prompt, max_tokens=TOKENS, temperature=0)
    encode = model.tokenizer.encode
    ours, theirs = encode(prompt + text), encode(prompt + llama_text(prompt))
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return
    logits = model.logits(ours[:at])[-1]
    gap = logits[ours[at]] - logits[theirs[at]]
    print(f"token {at}: {ours[at]} and {theirs[at]}, {gap:.3f} apart")
    assert logits.argmax() == ours[at]
    assert gap < NOISE

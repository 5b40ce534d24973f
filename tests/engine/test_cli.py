"""`fk generate`, `fk chat`, `fk bench decode`, `fk pull`."""

import json
import os
import signal
import subprocess
import time

import pytest


def run(program, *arguments, **options):
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )


def test_golden_text(fk_program, data):
    model, tokenizer = data / "stories260K.bin", data / "tok512.bin"
    result = run(fk_program, "generate", model, "--tokenizer", tokenizer, "-n", 200, "--temp", 0)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (data / "stories260K.greedy200.txt").read_text().strip()
    assert "200 tokens" in result.stderr


def test_builtin_model(fk_program):
    begin = time.monotonic()
    first = run(fk_program, "generate", "-n", 1, "-q")
    assert time.monotonic() - begin < 5  # 0.2 s on a machine that is not busy
    assert first.returncode == 0 and first.stdout
    texts = {
        run(fk_program, "generate", "-n", 40, "--seed", 7, "--threads", n).stdout for n in (1, 2)
    }
    assert len(texts) == 1


def test_json(fk_program):
    result = run(fk_program, "generate", "-p", "O Romeo", "-n", 12, "--seed", 1, "--json")
    said = json.loads(result.stdout)
    assert said["prompt"] == "O Romeo" and said["seed"] == 1
    assert len(said["tokens"]) == 12 and said["end"] == "length"


def test_prompt_from_stdin(fk_program):
    options = ("-n", 10, "--temp", 0, "-q")
    piped = run(fk_program, "generate", "-p", "-", *options, input="The sun")
    assert piped.stdout == run(fk_program, "generate", "-p", "The sun", *options).stdout
    echoed = run(fk_program, "generate", "-p", "The sun", "--echo", *options)
    assert echoed.stdout == "The sun" + piped.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing.gguf"], "no such file or folder"),
        (["--temp", "-1"], "--temp"),
        (["--quantize", "q2"], "quantize: expected"),
        (["--device", "cuda"], "device: expected cpu"),
    ],
)
def test_errors(fk_program, arguments, message):
    result = run(fk_program, "generate", *arguments)
    assert result.returncode != 0 and message in result.stderr
    assert not result.stdout


def test_pull_names_what_there_is(fk_program, tmp_path):
    result = run(fk_program, "generate", "smollm2", env=os.environ | {"FK_CACHE": str(tmp_path)})
    assert result.returncode == 1 and "fk pull smollm2" in result.stderr


def test_chat_needs_a_template(fk_program):
    result = run(fk_program, "chat", "-p", "Hello")
    assert result.returncode == 1 and "no chat template" in result.stderr


def test_interrupt_ends_the_text(fk_program):
    process = subprocess.Popen(
        [fk_program, "generate", "-n", "1000000", "--context", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "tokens/s" in errors


def test_bench_decode(fk_program):
    result = run(fk_program, "bench", "decode", "--prompt", 32, "-n", 8, "--repeats", 2, "--json")
    said = json.loads(result.stdout)
    assert said["tokens_per_second"] > 0 and said["prompt_tokens_per_second"] > 0
    assert said["read_bandwidth"] > 0

"""`fk generate`, `fk chat`, `fk bench decode`, `fk pull`."""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
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
        (["--temp", "-1"], "--temp: expected a number from 0 up, got -1\n"),
        (["--temp", "nan"], "--temp: expected a number from 0 up, got nan\n"),
        (["--top-p", "0"], "--top-p: expected a number above 0, at most 1, got 0\n"),
        (
            ["--seed", 2**64],
            f"--seed: expected a whole number from 0 to {2**64 - 1}, got {2**64}\n",
        ),
        (["--seed=-1"], "got -1\n"),
        (["-n", "1.5"], "--max-tokens: expected a whole number from 0 up, got 1.5\n"),
        (["--tokenizer", "nothing.json"], "tokenizer: expected none for the built-in model"),
        (["--quantize", "q2"], "quantize: expected"),
        (["--device", "cuda"], "device: expected cpu, the only one that runs models, got cuda\n"),
        ([""], "MODEL: expected a path or a name, got an empty text\n"),
    ],
)
def test_errors(fk_program, arguments, message):
    result = run(fk_program, "generate", *arguments)
    assert result.returncode != 0 and message in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("check", ["--samples", 0], "--samples: expected a whole number from 1 up, got 0\n"),
        ("check", ["--device", "tpu"], "--device: tpu not in {cpu,cuda}\n"),
        ("info", ["--nothing"], "The following argument was not expected: --nothing\n"),
        ("bench decode", ["--repeats", 0], "--repeats: expected a whole number from 1 up, got 0\n"),
        ("bench decode", ["--peer", "no-such"], "--peer: expected a program, found no no-such\n"),
        ("chat", ["-p", "Hello"], "MODEL: expected one with a chat template"),
    ],
)
def test_wrong_usage(fk_program, command, arguments, message):
    result = run(fk_program, *command.split(), *arguments)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(f"fk {command}: {message}")


@pytest.mark.parametrize(
    "arguments",
    ["generate -n 4", "generate -n 4 --json", "info", "check sum --samples 1", "--help"]
    + ["--version", "bench --help", "pull --help"],
)
def test_output_that_cannot_be_written(fk_program, arguments):
    # Unbuffered, argparse drops its own errors.
    environment = os.environ | {"FK_PYTHON": sys.executable, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [fk_program, *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert result.returncode == 1
    assert result.stderr.startswith("fk") and "Traceback" not in result.stderr


def test_closed_pipe_is_quiet(fk_program):
    command = f"{fk_program} generate -n 2000 --context 4000 -q | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert len(result.stdout) == 1 and not result.stderr


def test_alone_it_helps(fk_program):
    result = run(fk_program)
    assert result.returncode == 2 and "Usage: fk" in result.stderr and not result.stdout


def test_pull_names_what_there_is(fk_program, tmp_path):
    result = run(fk_program, "generate", "smollm2", env=os.environ | {"FK_CACHE": str(tmp_path)})
    assert result.returncode == 1 and "fk pull smollm2" in result.stderr


def test_cache_without_a_home(fk_program):
    """The program looks where `fk pull` writes."""
    names = ("HOME", "XDG_CACHE_HOME", "FK_CACHE")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    folder = subprocess.run(
        [sys.executable, "-c", "from flashkernel.pull import *; print(cache_folder())"],
        env=environment,
        capture_output=True,
        text=True,
    ).stdout.strip()
    result = run(fk_program, "generate", "smollm2", "-n", 0, "--json", env=environment)
    assert folder and folder in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["bench", "pull"])
def test_no_python_of_the_current_folder(fk_program, tmp_path, command):
    for name in ("json", "runpy", "flashkernel"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    environment = os.environ | {"FK_PYTHON": sys.executable}
    result = run(fk_program, command, "--help", cwd=tmp_path, env=environment)
    assert result.returncode == 0 and f"usage: fk {command}" in result.stdout, result.stderr


def test_interrupted_python(fk_program, tmp_path):
    """A stand-in for the module: Ctrl-C at any moment, an import too."""
    (tmp_path / "flashkernel").mkdir()
    (tmp_path / "flashkernel" / "__init__.py").touch()
    (tmp_path / "flashkernel" / "bench.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"FK_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    result = run(fk_program, "bench", env=environment)
    assert result.returncode == 130 and not result.stderr


def test_fifo(fk_program, tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    result = run(fk_program, "generate", tmp_path / "model.gguf")
    assert result.returncode == 1 and "expected a file, got a pipe" in result.stderr


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("model.gguf", b"\x07" * 64, 'model.gguf: expected a GGUF file, which begins with "GGUF"'),
        ("model.bin", b"root:x:0:0:root:/root:/bin/sh\n", "model.bin: is neither GGUF, safeten"),
        ("model.bin", b"short", "model.bin: is neither GGUF, safetensors nor llama2.c"),
        ("model.gguf", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_no_model(fk_program, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    result = run(fk_program, "generate", tmp_path / name)
    assert result.returncode == 1 and message in result.stderr


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


@pytest.mark.parametrize("tokens", [1, 1000000])
def test_interrupt_leaves_the_report(fk_program, tmp_path, tokens):
    """At the end of a text and within it. 70 MB of weights, so that memory would be measured."""
    vocab, dim, hidden, context = 2000, 1024, 4352, 4096
    header = struct.pack("<7i", dim, hidden, 1, 16, 16, vocab, context)
    floats = vocab * dim + 3 * dim + 4 * dim * dim + 3 * dim * hidden + context * dim // 16
    with open(tmp_path / "model.bin", "wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * floats)
    words = b"".join(struct.pack("<fi", 0, 4) + b"%04d" % i for i in range(vocab))
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 4) + words)
    options = ("-n", str(tokens), "--seed", "1", "--top-k", "0")
    process = subprocess.Popen(
        [fk_program, "generate", tmp_path / "model.bin", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(1), process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "prompt 1 tokens" in errors and "this machine reads" not in errors


def test_bench_decode(fk_program):
    result = run(fk_program, "bench", "decode", "--prompt", 32, "-n", 8, "--repeats", 2, "--json")
    said = json.loads(result.stdout)
    assert said["tokens_per_second"] > 0 and said["prompt_tokens_per_second"] > 0
    assert said["read_bandwidth"] > 0
    # Each round beside the best bandwidth of the whole run.
    for seconds, share in zip(said["token_seconds"], said["shares_of_bandwidth"], strict=True):
        rate = said["bytes_per_token"] / seconds
        assert share == pytest.approx(rate / said["read_bandwidth"])
    assert isinstance(said["disturbed"], list) and said["busy"]["others_cpus"] >= 0


def test_bench_decode_says_how_many_rounds(fk_program):
    result = run(fk_program, "bench", "decode", "--prompt", 8, "-n", 4, "--repeats", 2)
    assert "medians of 2 rounds after one to warm up" in result.stdout


def test_bench_decode_result_file(fk_program, tmp_path):
    """Rows of the same case are replaced, others stay."""
    path = tmp_path / "decode.json"
    for prompt in (16, 32, 16):
        options = ("--prompt", prompt, "-n", 4, "--repeats", 2, "--json", path)
        result = run(fk_program, "bench", "decode", *options)
        assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert sorted(row["op"] for row in rows) == ["decode", "first_token", "prefill", "prefill"]
    assert all(row["ms"]["p50"] > 0 and row["commit"] for row in rows)
    decode = next(row for row in rows if row["op"] == "decode")
    assert decode["percent_of_ceiling"] > 0 and decode["tbps"] > 0


def test_bench_decode_beside_a_peer(fk_program, tmp_path):
    """A stand-in for llama-bench: 100 tokens a second of the prompt, 10 of the text."""
    peer = tmp_path / "llama-bench"
    rows = [
        {"n_prompt": p, "n_gen": n, "avg_ts": ts, "build_commit": "abc"}
        for p, n, ts in ((16, 0, 100.0), (0, 4, 10.0))
    ]
    peer.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    peer.chmod(0o755)
    options = ("--prompt", 16, "-n", 4, "--repeats", 2, "--json", "--peer")
    said = json.loads(run(fk_program, "bench", "decode", *options, peer).stdout)
    theirs = said["peers"]["llama.cpp"]
    assert theirs["prompt_tokens_per_second"] == pytest.approx(100)
    assert theirs["tokens_per_second"] == pytest.approx(10)
    ratio = said["tokens_per_second"] / 10
    assert said["ratio_to_best_peer"]["decode"] == pytest.approx(ratio)
    refused = run(fk_program, "bench", "decode", *options, "/bin/false")
    assert refused.returncode == 1 and "gave no figures" in refused.stderr


def test_bench_decode_of_a_configuration(fk_program, tmp_path):
    """Weights are made up, for a benchmark and for nothing else."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ("--prompt", 8, "-n", 4, "--repeats", 1, "--json")
    for model in (path, tmp_path):
        result = run(fk_program, "bench", "decode", model, *options)
        said = json.loads(result.stdout)
        assert said["weights"].startswith("BF16") and said["tokens_per_second"] > 0
        # Layers, head: 2 * (4 + 2 + 2 + 4) * 32 * 64 + 2 * 3 * 64 * 96 + 320 * 64 weights.
        assert said["bytes_per_token"] >= 2 * (49152 + 36864 + 20480)
    refused = run(fk_program, "generate", path)
    assert refused.returncode == 1 and "name the folder" in refused.stderr
    refused = run(fk_program, "bench", "decode", "--json", tmp_path)
    assert refused.returncode != 0 and "ends in .json" in refused.stderr


def test_memory_that_runs_out_is_an_error_with_a_message(fk_program):
    """With ever more of it, from what it takes to start: an exit code, and never an abort."""

    def with_memory(megabytes, *arguments, **options):
        limit = int(megabytes * 2**20)
        return run(
            fk_program,
            *arguments,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            env={**os.environ, "FK_NUM_THREADS": "1"},
            **options,
        )

    least = next(n for n in range(8, 512) if with_memory(n, "--version").returncode == 0)
    messages = []
    for halves in range(80):
        result = with_memory(
            least + halves / 2, "generate", "-p", "-", "-n", 2, input="hello world " * 20000
        )
        assert result.returncode in (0, 1), (least + halves / 2, result)
        messages.append(result.stderr)
    assert any("memory" in message for message in messages)
    assert "the context holds" in messages[-1]

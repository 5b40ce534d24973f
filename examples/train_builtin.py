"""Trains the built-in model: a Llama of 3.4 million weights on public-domain English.

    python examples/train_builtin.py tokens novel.txt plays.txt --out tokens.npz
    python examples/train_builtin.py train tokens.npz --out builtin.gguf --seconds 40

The first step needs `tokenizers` and no GPU, the second torch and a GPU, and neither needs the
other's. Norms, attention with its rotation, and the loss run on flashkernel's kernels, forward and
backward. The weights are written as Q8_0, 3.6 MB.
"""

import argparse
import json
import math
import struct
import time

import numpy as np

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, CONTEXT = 1024, 256, 4, 4, 2, 768, 256
HEAD_DIM = DIM // HEADS
THETA, EPS = 10000.0, 1e-5


def make_tokens(files: list[str], out: str) -> None:
    """A byte-level BPE of these texts, their ids, and where paragraphs begin."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train(files, trainer)
    ids, starts = [], []
    for file in files:
        with open(file, encoding="utf-8") as f:
            paragraphs = [p for p in f.read().replace("\r\n", "\n").split("\n\n") if p.strip()]
        for paragraph in paragraphs:
            starts.append(len(ids))
            ids += tokenizer.encode(paragraph + "\n\n").ids
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    text = json.dumps({"tokens": tokens, "merges": merges})
    np.savez_compressed(
        out, ids=np.array(ids, np.uint16), starts=np.array(starts, np.int64), tokenizer=text
    )
    print(f"{len(ids)} tokens, {len(starts)} paragraphs")


class Model:
    """Weights in float32; products in bfloat16."""

    def __init__(self, device: str):
        import torch

        generator = torch.Generator().manual_seed(0)

        def matrix(rows, columns, scale=1.0):
            weight = torch.randn(rows, columns, generator=generator) * (0.02 * scale)
            return weight.to(device).requires_grad_()

        def ones():
            return torch.ones(DIM, device=device, requires_grad=True)

        small = 1 / math.sqrt(2 * LAYERS)
        self.weights = {"token_embd": matrix(VOCAB, DIM), "output_norm": ones()}
        for i in range(LAYERS):
            self.weights |= {
                f"blk.{i}.attn_norm": ones(),
                f"blk.{i}.attn_q": matrix(DIM, DIM),
                f"blk.{i}.attn_k": matrix(KV_HEADS * HEAD_DIM, DIM),
                f"blk.{i}.attn_v": matrix(KV_HEADS * HEAD_DIM, DIM),
                f"blk.{i}.attn_output": matrix(DIM, DIM, small),
                f"blk.{i}.ffn_norm": ones(),
                f"blk.{i}.ffn_gate": matrix(HIDDEN, DIM),
                f"blk.{i}.ffn_up": matrix(HIDDEN, DIM),
                f"blk.{i}.ffn_down": matrix(DIM, HIDDEN, small),
            }
        frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = torch.arange(CONTEXT, dtype=torch.float64)[:, None] * frequency
        self.rotary = angle.cos().float().to(device), angle.sin().float().to(device)

    def loss(self, ids, targets, dropout: float):
        import torch
        import torch.nn.functional as F

        import flashkernel as fk

        w = {name: p.to(torch.bfloat16) if p.ndim == 2 else p for name, p in self.weights.items()}
        batch, length = ids.shape
        cos, sin = (t[:length] for t in self.rotary)
        x = F.dropout(F.embedding(ids, w["token_embd"]), dropout)
        for i in range(LAYERS):
            layer = f"blk.{i}."
            h = fk.rms_norm(x, w[layer + "attn_norm"], eps=EPS)
            q, k, v = (
                F.linear(h, w[layer + "attn_" + name]).view(batch, length, -1, HEAD_DIM)
                for name in "qkv"
            )
            h = fk.attention(
                q, k, v, causal=True, rotary=(cos, sin), rotary_interleaved=True
            ).reshape(batch, length, DIM)
            x = x + F.dropout(F.linear(h, w[layer + "attn_output"]), dropout)
            h = fk.rms_norm(x, w[layer + "ffn_norm"], eps=EPS)
            h = F.silu(F.linear(h, w[layer + "ffn_gate"])) * F.linear(h, w[layer + "ffn_up"])
            x = x + F.dropout(F.linear(h, w[layer + "ffn_down"]), dropout)
        x = fk.rms_norm(x, w["output_norm"], eps=EPS)
        logits = F.linear(x, w["token_embd"]).view(-1, VOCAB)
        return fk.cross_entropy(logits, targets.reshape(-1))


def train(file: str, out: str, seconds: float, batch: int, device: str) -> None:
    """Keeps the weights that do best on paragraphs the training does not see."""
    import torch

    data = np.load(file)
    ids, starts = torch.from_numpy(data["ids"].astype(np.int64)), data["starts"]
    starts = starts[starts < len(ids) - CONTEXT]
    held_out = (np.arange(len(starts)) // 16) % 20 == 7  # every twentieth stretch of 16 paragraphs
    seen, unseen = starts[~held_out], starts[held_out]
    model = Model(device)
    decay = [p for p in model.weights.values() if p.ndim == 2]
    rest = [p for p in model.weights.values() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device != "cpu")
    random = np.random.default_rng(0)
    window = torch.arange(CONTEXT)

    def sample(choices):
        first = torch.from_numpy(choices)[:, None]
        targets = ids[first + window]
        begin = torch.zeros(len(choices), 1, dtype=torch.int64)  # <|endoftext|> begins a text
        return torch.cat([begin, targets[:, :-1]], 1).to(device), targets.to(device)

    def evaluate() -> float:
        with torch.no_grad():
            losses = [
                model.loss(*sample(unseen[i : i + batch]), 0.0).item()
                for i in range(0, len(unseen), batch)
            ]
        return sum(losses) / len(losses)

    evaluate()  # the first calls load kernels; the clock starts after them
    model.loss(*sample(seen[:batch]), 0.15).backward()
    optimizer.zero_grad(set_to_none=True)
    begin, step, best, kept = time.monotonic(), 0, math.inf, None
    while (progress := (time.monotonic() - begin) / seconds) < 1:
        rate = 3e-3 * min(1, (step + 1) / 50) * (0.51 + 0.49 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model.loss(*sample(random.choice(seen, batch)), 0.15)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 or time.monotonic() - begin >= seconds:
            error = evaluate()
            if error < best:
                best = error
                kept = {n: p.detach().cpu().numpy().copy() for n, p in model.weights.items()}
            print(f"step {step}: loss {loss.item():.3f}, held out {error:.3f}", flush=True)
    print(f"{step} steps, held out {best:.3f} nats a token", flush=True)
    write_gguf(out, kept, json.loads(str(data["tokenizer"])))


def q8_0(x: np.ndarray) -> bytes:
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    packed = np.empty(len(blocks), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    packed["d"], packed["q"] = scale[:, 0], codes
    return packed.tobytes()


def write_gguf(path: str, weights: dict[str, np.ndarray], tokenizer: dict) -> None:
    uint32, float32, boolean, string, array = 4, 6, 7, 8, 9

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def strings(values: list[str]) -> bytes:
        return struct.pack("<IQ", string, len(values)) + b"".join(map(text, values))

    kinds = [3] + [1] * (VOCAB - 1)  # control, then ordinary tokens
    fields = {
        "general.architecture": (string, text("llama")),
        "general.name": (string, text("flashkernel built-in")),
        "general.license": (string, text("MIT")),
        "llama.block_count": (uint32, struct.pack("<I", LAYERS)),
        "llama.context_length": (uint32, struct.pack("<I", CONTEXT)),
        "llama.embedding_length": (uint32, struct.pack("<I", DIM)),
        "llama.feed_forward_length": (uint32, struct.pack("<I", HIDDEN)),
        "llama.attention.head_count": (uint32, struct.pack("<I", HEADS)),
        "llama.attention.head_count_kv": (uint32, struct.pack("<I", KV_HEADS)),
        "llama.attention.layer_norm_rms_epsilon": (float32, struct.pack("<f", EPS)),
        "llama.rope.dimension_count": (uint32, struct.pack("<I", HEAD_DIM)),
        "llama.rope.freq_base": (float32, struct.pack("<f", THETA)),
        "llama.vocab_size": (uint32, struct.pack("<I", VOCAB)),
        "tokenizer.ggml.model": (string, text("gpt2")),
        "tokenizer.ggml.pre": (string, text("gpt-2")),
        "tokenizer.ggml.tokens": (array, strings(tokenizer["tokens"])),
        "tokenizer.ggml.merges": (array, strings(tokenizer["merges"])),
        "tokenizer.ggml.token_type": (array, struct.pack(f"<IQ{VOCAB}i", 5, VOCAB, *kinds)),
        "tokenizer.ggml.bos_token_id": (uint32, struct.pack("<I", 0)),
        "tokenizer.ggml.eos_token_id": (uint32, struct.pack("<I", 0)),
        "tokenizer.ggml.add_bos_token": (boolean, b"\1"),
    }
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(fields))
    for key, (kind, value) in fields.items():
        header += text(key) + struct.pack("<I", kind) + value
    body = b""
    for name, weight in weights.items():
        header += text(name + ".weight") + struct.pack("<I", weight.ndim)
        header += struct.pack(f"<{weight.ndim}Q", *reversed(weight.shape))
        header += struct.pack("<IQ", 8 if weight.ndim == 2 else 0, len(body))
        body += q8_0(weight) if weight.ndim == 2 else weight.astype("<f4").tobytes()
        body += b"\0" * (-len(body) % 32)
    with open(path, "wb") as f:
        f.write(header + b"\0" * (-len(header) % 32) + body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    tokens = steps.add_parser("tokens")
    tokens.add_argument("files", nargs="+")
    tokens.add_argument("--out", required=True)
    training = steps.add_parser("train")
    training.add_argument("file")
    training.add_argument("--out", required=True)
    training.add_argument("--seconds", type=float, default=40)
    training.add_argument("--batch", type=int, default=96)
    training.add_argument("--device", default="cuda")
    a = parser.parse_args()
    if a.step == "tokens":
        make_tokens(a.files, a.out)
    else:
        train(a.file, a.out, a.seconds, a.batch, a.device)


if __name__ == "__main__":
    main()

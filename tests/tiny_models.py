"""Models of a few kilobytes that write anything at all: their weights are zeros, so that every
token is as likely as any other."""

import json
import pathlib
import struct

DIM, HIDDEN, HEADS, CONTEXT = 64, 64, 4, 512


def llama2c(folder: pathlib.Path, words=(), name="model.bin") -> pathlib.Path:
    """A llama2.c model whose tokens are the bytes and some words, its tokenizer.bin beside it."""
    texts = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256)), *words]
    vocab = len(texts)
    floats = vocab * DIM + 3 * DIM + 4 * DIM * DIM + 3 * DIM * HIDDEN + CONTEXT * DIM // HEADS
    header = struct.pack("<7i", DIM, HIDDEN, 1, HEADS, HEADS, vocab, CONTEXT)
    (folder / name).write_bytes(header + bytes(4 * floats))
    tokens = b"".join(struct.pack("<fi", 0, len(text)) + text for text in texts)
    longest = struct.pack("<i", max(map(len, texts)))
    (folder / "tokenizer.bin").write_bytes(longest + tokens)
    return folder / name


CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def chat_folder(folder: pathlib.Path) -> pathlib.Path:
    """A Hugging Face folder whose tokens are bytes, with ChatML's template."""
    folder.mkdir(exist_ok=True)
    vocab = {character: i for i, character in enumerate(byte_alphabet())}
    special = [
        {"id": 256 + i, "content": f"<|im_{what}|>", "special": True, "normalized": False}
        | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        for i, what in enumerate(("start", "end"))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    config = {
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": [258, DIM], "model.norm.weight": [DIM]}
    shapes |= {layer + f"{n}_layernorm.weight": [DIM] for n in ("input", "post_attention")}
    shapes |= {layer + f"self_attn.{n}_proj.weight": [DIM, DIM] for n in "qkvo"}
    shapes |= {layer + f"mlp.{n}_proj.weight": [HIDDEN, DIM] for n in ("gate", "up")}
    shapes |= {layer + "mlp.down_proj.weight": [DIM, HIDDEN]}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if shape[1:] else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return folder

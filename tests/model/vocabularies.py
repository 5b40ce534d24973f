"""Tokenizers of every supported kind, built with Hugging Face's `tokenizers`: the real vocabularies
where ../shared/data has them, and small ones trained on the text there."""

import functools
import json
import pathlib
import struct

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + WORDS + r"\p{N}" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def data(name: str) -> pathlib.Path:
    if not (DATA / name).exists():
        pytest.skip(f"needs {name} of ../shared/data")
    return DATA / name


@functools.cache
def corpus() -> str:
    return data("tiny_shakespeare.txt").read_text()


@functools.cache
def gpt2_model() -> tuple[dict, list]:
    vocab = json.loads(data("gpt2_encoder.json").read_text())
    lines = data("gpt2_vocab.bpe").read_text().splitlines()[1:]
    return vocab, [tuple(line.split(" ")) for line in lines if line]


def byte_level(split=None, normalizer=None, ignore_merges=False, **options) -> Tokenizer:
    vocab, merges = gpt2_model()
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(split), "isolated")] if isinstance(split, str) else []
    steps += split or [] if not isinstance(split, str) else []
    last = pre_tokenizers.ByteLevel(
        **{"add_prefix_space": False, "use_regex": not steps or not isinstance(split, str)}
        | options
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    if normalizer:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return made


def llama3() -> Tokenizer:
    made = byte_level(LLAMA3, ignore_merges=True)
    made.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))],
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def added_tokens() -> Tokenizer:
    """Every way in which an added token can be looked for."""
    made = byte_level(normalizer=normalizers.NFC())
    made.add_tokens(
        [
            AddedToken("<s>", special=True, lstrip=True),
            AddedToken("</s>", special=True, rstrip=True),
            AddedToken("the", single_word=True, normalized=False),
            AddedToken("é", normalized=True),
            AddedToken("  ", normalized=False),
            AddedToken("Hello wor", normalized=True),
            AddedToken("Hello", normalized=False),
        ]
    )
    return made


@functools.cache
def sentencepiece_model() -> tuple[dict, list]:
    """A small vocabulary in Llama 2's form: bytes, then pieces learnt from the corpus."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=first, show_progress=False)
    made.train_from_iterator(corpus()[:400_000].splitlines(), trainer)
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def sentencepiece(metaspace: bool, **options) -> Tokenizer:
    vocab, merges = sentencepiece_model()
    made = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(**options)
        steps = [decoders.Metaspace(prepend_scheme=options.get("prepend_scheme", "always"))]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if options.get("prepend_scheme", "always") != "never":
            steps.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    return made


def without_fallback() -> Tokenizer:
    vocab, merges = sentencepiece_model()
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def llama2c(path: pathlib.Path, metaspace: str = " ") -> Tokenizer:
    """A tokenizer.bin with its scores, as the merges that they mean."""
    raw = path.read_bytes()
    at, tokens, scores = 4, [], []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8
        tokens.append(raw[at : at + length].decode())
        scores.append(score)
        at += length
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    vocab = {t: i for i, t in reversed(list(enumerate(tokens)))}
    pairs = []
    for token, i in vocab.items():
        if i < 259:
            continue
        for cut in range(1, len(token)):
            a, b = token[:cut], token[cut:]
            if vocab.get(a, 0) >= 259 and vocab.get(b, 0) >= 259:
                pairs.append((-scores[i], a, b))
    merges = [(a, b) for _, a, b in sorted(pairs)]
    made = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Prepend(metaspace)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    return made


DIGITS = [pre_tokenizers.Digits(individual_digits=True)]
KINDS = {
    "gpt2": byte_level,
    "gpt2_prefix": lambda: byte_level(add_prefix_space=True),
    "smollm": lambda: byte_level(DIGITS),
    "digit_runs": lambda: byte_level([pre_tokenizers.Digits(individual_digits=False)]),
    "llama3": llama3,
    "qwen2": lambda: byte_level(QWEN2, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level(TEKKEN),
    "added_tokens": added_tokens,
    "llama2": lambda: sentencepiece(metaspace=False),
    "mistral": lambda: sentencepiece(metaspace=True, prepend_scheme="first", split=False),
    "metaspace": lambda: sentencepiece(metaspace=True, prepend_scheme="always"),
    "no_prefix": lambda: sentencepiece(metaspace=True, prepend_scheme="never", split=False),
    "without_fallback": without_fallback,
}
SPLITS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
KINDS |= {
    f"split_{behavior}{'_inverted' * invert}": lambda behavior=behavior, invert=invert: byte_level(
        [pre_tokenizers.Split(Regex(r"\s+|\p{P}"), behavior, invert=invert)]
    )
    for behavior in SPLITS
    for invert in (False, True)
}

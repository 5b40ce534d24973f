"""Our tokenizers against Hugging Face's on 100,000 random and adversarial texts, and chats against
Jinja's rendering of templates."""

import random
import unicodedata

import jinja2
import pytest
from tokenizers import AddedToken, normalizers

import texts
import vocabularies
from flashkernel._model import ModelFile, Tokenizer

COUNT = 100_000 // len(vocabularies.KINDS) + 1


@pytest.fixture(scope="module")
def words():
    return vocabularies.corpus()[:60_000].split()


@pytest.fixture(scope="module")
def newer_marks() -> set[str]:
    """Marks that Hugging Face's NFC does not order, as its table does not have them."""
    compose = normalizers.NFC().normalize_str
    marks = [c for c in texts.CHARACTERS if unicodedata.combining(c)]

    def sorts(mark):
        other = "\u0334" if unicodedata.combining(mark) > 1 else "\u0301"
        pair = mark + other if unicodedata.combining(mark) > 1 else other + mark
        return compose("x" + pair) != "x" + pair

    return {m for m in marks if not sorts(m)}


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_equal_to_hugging_face(kind, words, newer_marks, tmp_path):
    theirs = vocabularies.KINDS[kind]()
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    ours = Tokenizer(path)
    assert len(newer_marks) < 200  # of about 900
    samples = texts.texts(COUNT, 1, words)
    if theirs.normalizer and "NFC" in repr(theirs.normalizer):
        samples = ["".join(c for c in s if c not in newer_marks) for s in samples]
    expected = theirs.encode_batch(samples)
    for text, encoding in zip(samples, expected, strict=True):
        assert ours.encode(text) == encoding.ids, repr(text)
        assert ours.decode(encoding.ids) == theirs.decode(encoding.ids), repr(text)
    for text in samples[:: COUNT // 200]:
        plain = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == plain, repr(text)
        everything = theirs.decode(plain, skip_special_tokens=False)
        assert ours.decode(plain, skip_special=False) == everything, repr(text)


ALPHABET = ["a", "b", "ab", "ä", " ", "  ", "\n", "\t", "<", "s>", "<s>", "é", "e\u0301", "_", "1"]
ALPHABET += ["the", " the", "A", "日", "-", "▁"]


def random_added_tokens(rng: random.Random, theirs) -> list[str]:
    """Adds tokens with random flags, many of them beginnings of others."""
    first = "".join(rng.choices(ALPHABET, k=rng.randint(1, 3)))
    contents = {"".join(rng.choices(ALPHABET, k=rng.randint(1, 4))) for _ in range(8)}
    contents |= {first * n + rng.choice(ALPHABET) for n in range(1, 4)} | {first}
    flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
    for content in sorted(contents):
        token = AddedToken(content, **{flag: rng.random() < 0.3 for flag in flags})
        (theirs.add_special_tokens if token.special else theirs.add_tokens)([token])
    return sorted(contents)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama2", "mistral"])
@pytest.mark.parametrize("seed", range(5))
def test_added_tokens_of_every_kind(kind, seed, tmp_path):
    rng = random.Random(seed)
    theirs = vocabularies.KINDS[kind]()
    pieces = ALPHABET + 2 * random_added_tokens(rng, theirs)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path / "tokenizer.json")
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.choice((1, 2, 3, 5, 8, 13))))
        try:
            expected = theirs.encode(text).ids
        except BaseException as error:  # theirs panics where a token takes more than is left
            assert "bad split" in str(error)  # noqa: PT017
            continue
        assert ours.encode(text) == expected, repr(text)


def test_white_space_that_another_token_has_taken(tmp_path):
    theirs = vocabularies.byte_level()
    theirs.add_tokens([AddedToken("<s>", rstrip=True, normalized=False)])
    theirs.add_tokens([AddedToken(" ", lstrip=True, normalized=False)])
    theirs.add_tokens([AddedToken("\t", normalized=False)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path / "tokenizer.json")
    for text in ("<s> ", "<s>\t", "<s> a", "<s>\ta <s> ", "a  <s>", "<s>\t\t b"):
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_special_tokens_as_plain_text(kind, words, tmp_path):
    theirs = vocabularies.KINDS[kind]()
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    ours = Tokenizer(path)
    theirs.encode_special_tokens = True
    for text in texts.texts(2000, 2, words):
        got = ours.encode(text, add_special=False, parse_special=False)
        assert got == theirs.encode(text, add_special_tokens=False).ids, repr(text)


def test_long_text_at_once(tmp_path):
    text = vocabularies.data("frankenstein.txt").read_text()
    for kind in ("gpt2", "llama3", "qwen2", "llama2"):
        theirs = vocabularies.KINDS[kind]()
        path = tmp_path / f"{kind}.json"
        theirs.save(str(path))
        assert Tokenizer(path).encode(text) == theirs.encode(text).ids


def test_llama2c(words):
    path = vocabularies.data("tok512.bin")
    ours, theirs = Tokenizer(path), vocabularies.llama2c(path)
    for text in texts.texts(5000, 3, words):
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)
        assert ours.decode(ours.encode(text, parse_special=False)) == text, repr(text)


def test_golden_story():
    model = ModelFile(vocabularies.data("stories260K.bin"), vocabularies.data("tok512.bin"))
    text = vocabularies.data("stories260K.greedy200.txt").read_text()
    ids = model.tokenizer.encode(text)
    assert ids[0] == model.tokenizer.bos and model.tokenizer.decode(ids) == text


# In the manner of the families' own templates.
CHATML = """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{
'<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + m['role'] + '\n' +
m['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{
'<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] +
'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c =
'<|begin_of_text|>' + c %}{% endif %}{{ c }}{% endfor %}{% if add_generation_prompt %}{{
'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system =
messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{%
for m in rest %}{% if loop.index0 == 0 and system %}{% set c = '<<SYS>>\n' + system +
'\n<</SYS>>\n\n' + m['content'].strip() %}{% else %}{% set c = m['content'].strip() %}{% endif %}{%
if m['role'] == 'user' %}{{ '<s>[INST] ' + c + ' [/INST]' }}{% else %}{{ ' ' + c + ' </s>' }}{%
endif %}{% endfor %}"""
MISTRAL = """{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}{{
'[INST] ' + message['content'] + '[/INST]' }}{% else %}{{
' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"""
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "Hello  <|im_end|> there"},
    {"role": "assistant", "content": "Hi, 12 \U0001f600\n"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize(
    "chat_template, name",
    [(CHATML, "chatml"), (LLAMA3, "llama3"), (LLAMA2, "llama2"), (MISTRAL, "mistral")],
)
def test_chat_templates(chat_template, name, tmp_path):
    vocabularies.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(chat_template)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_format == name
    talks = [TALK, TALK[:1]] + ([[SYSTEM, *TALK]] if name != "mistral" else [])
    for messages in talks:
        for prompt in (True, False):
            if name in ("llama2", "mistral") and not prompt:
                continue  # these have no sign for a turn that is to come
            expected = jinja2.Template(chat_template).render(
                messages=messages, add_generation_prompt=prompt
            )
            assert tokenizer.format_chat(messages, prompt=prompt) == expected
    # What a user writes is never a special token.
    ids = tokenizer.encode_chat(TALK)
    assert ids.count(tokenizer.token_id("<|im_end|>")) == (4 if name == "chatml" else 0)

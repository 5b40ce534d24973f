"""Texts that tokenizers get wrong: every script, broken up and mixed, and the signs they treat
apart."""

import random
import sys
import unicodedata

# Characters that this Python's Unicode assigns: others may be letters in one library's newer table
# and nothing in another's, which is not what is compared.
CHARACTERS = [
    chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) not in ("Cs", "Cn")
]
BLOCKS = [range(a, b) for a, b in [(0x20, 0x7F), (0, 0x100), (0x100, 0x250), (0x300, 0x370)]]
BLOCKS += [range(a, b) for a, b in [(0x370, 0x600), (0x600, 0x900), (0x900, 0x1200)]]
BLOCKS += [range(a, b) for a, b in [(0x1100, 0x1200), (0x1E00, 0x2070), (0x2070, 0x2C00)]]
BLOCKS += [range(a, b) for a, b in [(0x3000, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAD00)]]
BLOCKS += [range(a, b) for a, b in [(0xFB00, 0xFE10), (0xFF00, 0xFFF0), (0x1D100, 0x1D800)]]
BLOCKS += [range(a, b) for a, b in [(0x1F300, 0x1F650), (0xE0000, 0xE0080)]]
KNOWN = set(CHARACTERS)
BLOCKS = [[chr(c) for c in block if chr(c) in KNOWN] for block in BLOCKS]

SPACES = " \t\n\r\v\f\x85\xa0\u1680\u180e\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
PIECES = [
    *("'s", "'S", "'t", "'re", "'VE", "'m", "'ll", "'D", "'ſ", "’s", "'", "''s", "can't", "I'll"),
    *("0", "12", "345", "6789", "1234567890", "٣٤", "½", "Ⅷ", "²", "१२३", "3.14", "1,000"),
    *("  ", "   ", "\n\n", "\r\n", " \n ", "\t\t", " \u00a0 ", "▁", "▁▁", " ▁", "Ġ", "Ċ", "<0x0A>"),
    *("<|endoftext|>", "<|im_start|>", "<|im_end|", "<s>", "</s>", " </s> ", "<s", "<unk>"),
    *("e\u0301", "\u0041\u030a", "\u1100\u1161\u11a8", "\u0344", "\u0958", "q\u0307\u0323"),
    *("👩\u200d👩\u200d👧", "🇩🇪", "é", "ﬁ", "\u212b", "\u2126", "ß", "İ", "ı", "\u0000", "\x7f"),
    *("the", " the", "The ", "Hello", " world", "international", "tokenization", "aaaaaaaa"),
    *("...", "!!!", "---", "=>", "://", "</", "{}", "[]", "$1", "#", "@user", "a_b", "a-b"),
]


def one_text(rng: random.Random, words: list[str]) -> str:
    out = []
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13, 21))):
        kind = rng.random()
        if kind < 0.25:
            out.append(rng.choice(words))
        elif kind < 0.5:
            out.append(rng.choice(PIECES))
        elif kind < 0.6:
            out.append("".join(rng.choices(SPACES, k=rng.randint(1, 4))))
        elif kind < 0.7:
            out.append(rng.choice(CHARACTERS))
        elif kind < 0.9:
            out.append("".join(rng.choices(rng.choice(BLOCKS), k=rng.randint(1, 6))))
        else:
            out.append(" ")
    return "".join(out)


def texts(count: int, seed: int, words: list[str]) -> list[str]:
    rng = random.Random(seed)
    return [one_text(rng, words) for _ in range(count)]

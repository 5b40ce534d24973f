"""Texts that come from outside: names in files, what other programs said."""


def printable(text: str) -> str:
    """The text as a terminal shows it and never obeys it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

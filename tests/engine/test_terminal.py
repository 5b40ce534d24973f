"""What the program writes to a terminal: nothing that a model, a file or an argument says is obeyed
there, and all of it goes into a pipe as it is."""

import errno
import json
import os
import pty
import re
import select
import stat
import subprocess
import termios
import unicodedata

import pytest

import tiny_models

HOSTILE = ["\x1b[2J", "\u009b31m", "\x1b]0;title\x07", "\u202e", "\x7f", "\r", "\x00", "caf\u00e9"]
HOSTILE += ["\u2028", "\U0001f600", "plain ", "line\n", "\ttab"]
SAMPLING = ("--seed", "3", "--top-k", "0", "--top-p", "1", "-q")
OBEYED = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def is_obeyed(c: str) -> bool:
    return (unicodedata.category(c) == "Cc" and c not in "\n\t") or c in OBEYED


def escaped(raw: bytes) -> str:
    """What a terminal should get for these bytes."""
    text = raw.decode(errors="surrogateescape")
    return "".join(
        "".join(f"\\x{b:02X}" for b in c.encode(errors="surrogateescape"))
        if is_obeyed(c) or "\udc80" <= c <= "\udcff"
        else c
        for c in text
    )


def open_terminal() -> tuple[int, int]:
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST  # newlines as they are written
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    return ours, theirs


class OnTerminal:
    """The program with stdout and stderr each on a terminal of its own, and stdin on the first."""

    def __init__(self, command, **options):
        out, out_end = open_terminal()
        err, err_end = open_terminal()
        self.process = subprocess.Popen(
            [os.fsencode(str(c)) for c in command],
            **{"stdin": out_end, "stdout": out_end, "stderr": err_end} | options,
        )
        os.close(out_end), os.close(err_end)
        self.terminal, self.said = out, {out: b"", err: b""}
        self.open = [out, err]

    def read(self, until=None):
        """What comes until stdout ends with something, or to the end."""
        while self.open and not (until and self.said[self.terminal].endswith(until)):
            ready, _, _ = select.select(self.open, [], [], 60)
            assert ready, self.said
            for file in ready:
                try:
                    part = os.read(file, 65536)
                except OSError as error:
                    assert error.errno == errno.EIO  # the program has ended
                    part = b""
                self.said[file] += part
                if not part:
                    self.open.remove(file)
                    os.close(file)

    def type(self, keys: bytes):
        os.write(self.terminal, keys)

    def finish(self) -> tuple[bytes, bytes]:
        self.read()
        self.process.wait(60)
        return tuple(self.said.values())


def on_terminal(*command, **options) -> tuple[bytes, bytes]:
    return OnTerminal(command, **options).finish()


def piped(*command) -> tuple[bytes, bytes]:
    done = subprocess.run([os.fsencode(str(c)) for c in command], capture_output=True, timeout=120)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    words = [word.encode() for word in HOSTILE]
    return tiny_models.llama2c(tmp_path_factory.mktemp("hostile"), words * 20)


def test_generated_text(fk_program, hostile):
    command = (fk_program, "generate", hostile, "-n", 400, *SAMPLING)
    raw, _ = piped(*command)
    assert b"\x1b[2J" in raw and b"\xc2\x9b" in raw and b"\x00" in raw and b"\x07" in raw
    shown, _ = on_terminal(*command)
    assert shown.decode() == escaped(raw) + "\n"
    assert not any(map(is_obeyed, shown.decode()))
    assert "caf\u00e9" in shown.decode() and "\U0001f600" in shown.decode()


def test_echoed_prompt(fk_program, hostile):
    prompt = os.fsdecode(b"\x1b[31m \xff \xc3\xa9 \xe2\x80")
    command = (fk_program, "generate", hostile, "-n", 0, "--echo", "-p", prompt, *SAMPLING)
    assert piped(*command)[0] == os.fsencode(prompt)
    shown = on_terminal(*command)[0]
    assert shown.decode() == "\\x1B[31m \\xFF \u00e9 \\xE2\\x80\n"


def test_characters_that_are_cut(fk_program, tmp_path):
    """A stop string that is the end of a character holds that end back."""
    model = tiny_models.llama2c(tmp_path, ["\u00e9".encode()] * 2000)
    stop = os.fsdecode(b"\xa9X")
    command = (fk_program, "generate", model, "-n", 100, "--stop", stop, *SAMPLING)
    raw, _ = piped(*command)
    assert raw.count(b"\xc3\xa9") > 50
    assert on_terminal(*command)[0].decode() == escaped(raw) + "\n"


def test_json(fk_program, hostile):
    command = (fk_program, "generate", hostile, "-n", 400, *SAMPLING, "--json")
    shown, _ = on_terminal(*command)
    assert not any(map(is_obeyed, shown.decode()))
    said, expected = json.loads(shown), json.loads(piped(*command)[0])
    assert said["text"] == expected["text"] and said["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "no\x1b[2J\u009bsuch"],
        ["generate", os.fsdecode(b"no\xff\x1b[2J")],
        ["generate", "--temp", "\x1b[2J\u009b"],
        ["generate", "--\x1b[2J"],
        ["generate", "--tokenizer", "\x1b[2J"],
        ["chat", "no\x1b[2J"],
        ["check", "\x1b[2J"],
        ["bench", "decode", "no\x1b[2J"],
        ["\x1b[2J"],
    ],
)
def test_messages(fk_program, arguments):
    _, errors = on_terminal(fk_program, *arguments)
    assert not any(map(is_obeyed, errors.decode())) and "\\x1B[2J" in errors.decode()


def test_a_message_in_a_pipe_is_as_it_is(fk_program):
    assert b"got \x1b[2J;" in piped(fk_program, "\x1b[2J")[1]


def test_chat(fk_program, tmp_path):
    """The model's name, its answers, what was typed, and the lines that were typed before."""
    model = tiny_models.chat_folder(tmp_path / "\x1b[2Jmodel")
    (tmp_path / "chat_history").write_bytes(b"old \x1b[2J\xc2\x9b31m\xff line\n")
    environment = os.environ | {"FK_CACHE": str(tmp_path)}
    options = ("-n", 100, "--seed", 1, "--top-k", 0, "-q")
    chat = OnTerminal((fk_program, "chat", model, *options), env=environment)
    chat.read(until=b"> \x1b[K")
    chat.type("h\u00e9llo \u009b1m".encode() + b"\r")
    chat.read(until=b"\n\r> \x1b[K")
    chat.type(b"\x1b[A\x1b[A")
    chat.read(until=b"line\x1b[K")
    chat.type(b"\x15/exit\r")
    shown, errors = (text.decode() for text in chat.finish())
    assert not any(map(is_obeyed, errors)) and "\\x1B[2Jmodel" in errors
    ours = re.sub(r"\r|\x1b\[(K|\d+D)", "", shown)
    assert not any(map(is_obeyed, ours))
    assert "> h\u00e9llo \\xC2\\x9B1m" in ours
    assert "> old \\x1B[2J\\xC2\\x9B31m\\xFF line" in ours
    assert re.search(r"\\x[01][0-9A-F]", ours.partition("1m\n")[2])  # the answer's


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize("before", [None, 0o644])
def test_history_is_for_its_owner_alone(fk_program, tmp_path, mask, before):
    model = tiny_models.chat_folder(tmp_path / "model")
    history = tmp_path / "cache" / "chat_history"
    if before is not None:
        history.parent.mkdir()
        history.write_text("before\n")
        history.chmod(before)
    elif mask == 0o777:
        history.parent.mkdir()  # which the program could not enter itself
    environment = os.environ | {"FK_CACHE": str(history.parent)}
    command = (fk_program, "chat", model, "-n", 1, "-q")
    chat = OnTerminal(command, env=environment, umask=mask)
    chat.read(until=b"> \x1b[K")
    chat.type(b"secret\r")
    chat.read(until=b"\n\r> \x1b[K")
    chat.type(b"/exit\r")
    chat.finish()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    written = history.read_text()
    assert written == ("before\n" if before else "") + "secret\n/exit\n"

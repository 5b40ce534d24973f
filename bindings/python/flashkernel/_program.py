"""How the modules that `fk` starts end."""

import os
import sys

from ._text import printable


def run(name: str, main) -> int:
    """main()'s exit code, or 1 and a line on stderr where a file or stdout cannot be written."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # `| head` has read what it wanted
            print(f"{name}: {printable(str(error))}", file=sys.stderr)
        # What stdout still holds would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1

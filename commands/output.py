"""What is printed: cells of a table that stay short, and standard output that nobody reads any more."""

import os
import sys

_LONGEST_CELL = 200


def short(text: str) -> str:
    """A text of any length as a cell of a table; --json has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_CELL else f"{line[: _LONGEST_CELL - 1]}…"


def silence_stdout() -> None:
    """Send what follows nowhere: what is left in the buffer would be written, and fail, once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Other processes for the store's tests: each runs a piece of Python in this project and is killed at the end."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from embedded.tied import tie

_ROOT = Path(__file__).parents[2]


class Script:
    """A Python process that prints lines; `with` kills it when the block ends."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = tie(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """The next line that it prints; it is killed when it prints none for long."""
        assert self._process.stdout is not None
        guard = threading.Timer(120, self._process.kill)
        guard.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            guard.cancel()

    def say(self, line: str = "") -> None:
        """One line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Its exit code; negative is the signal that ended it."""
        return self._process.wait(120)

    def kill(self) -> None:
        """SIGKILL, and its pipes closed."""
        self._process.kill()
        self._process.communicate()

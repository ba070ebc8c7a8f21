"""Processes that end with the one that started them, however that ends.

A reaper of its own reads a pipe from the starting process, which tells it of each child. When the pipe closes, also
because its writer was killed, the reaper kills the children that are left. Portable, and it works for any program, for
one that is stopped, and for one that has a process group of its own, all of which is killed then.

It needs a moment: who is killed between the start of a child and the word to the reaper leaves that one behind.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO, TypeVar

from embedded._process import birth_of

_ROOT = Path(__file__).resolve().parents[1]
_starting = threading.Lock()
_reaper: "subprocess.Popen[str] | None" = None

P = TypeVar("P", "subprocess.Popen[bytes]", "subprocess.Popen[str]")


def tie(process: P) -> P:
    """`process` itself, which ends at the latest when this process does."""
    global _reaper
    birth = birth_of(process.pid)
    if birth is None:
        return process
    with _starting:
        if _reaper is None or _reaper.poll() is not None:
            _reaper = subprocess.Popen(
                [sys.executable, "-m", "embedded.tied"],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # what ends our group must not end it before it has done its work
            )
            atexit.register(_let_go, _reaper)
        assert _reaper.stdin is not None
        _reaper.stdin.write(f"{process.pid} {birth}\n")
        _reaper.stdin.flush()
    return process


def _let_go(reaper: "subprocess.Popen[str]") -> None:
    reaper.communicate()


def _reap(births: TextIO) -> None:
    told = [line.split() for line in births]  # until the pipe closes
    for number, birth in told:
        pid = int(number)
        if birth_of(pid) != birth:
            continue  # it has ended; another one may have its number now
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _reap(sys.stdin)

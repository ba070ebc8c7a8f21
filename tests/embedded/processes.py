"""What runs on a home, and a parent process to be killed."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from embedded.tied import tie

ROOT = Path(__file__).resolve().parents[2]

PARENT = """
import sys, time, embedded
stack = embedded.start(sys.argv[1], services=sys.argv[2].split(","), headless=True)
print("ready", stack.guard_pid, flush=True)
time.sleep(600)
"""


def processes_of(home: Path) -> list[str]:
    """The live processes whose command line names this home (not the test's own parents)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(home) in line and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {line}")
    return found


@contextlib.contextmanager
def parent_with_stack(home: Path, services: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process (in its own group) that started an attached stack, and the pid of its guard."""
    parent = tie(
        subprocess.Popen(
            [sys.executable, "-c", PARENT, str(home), services],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
    )
    try:
        assert parent.stdout is not None
        word, _, guard = parent.stdout.readline().partition(" ")
        assert word == "ready"
        yield parent, int(guard)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def kill_and_wait(pid: int) -> None:
    """SIGKILL a process and wait until it is gone."""
    psutil.Process(pid).kill()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        time.sleep(0.01)

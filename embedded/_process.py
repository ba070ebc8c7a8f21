"""One child process with its log: spawned so that it dies with us, and never mistaken for another
one.

A pid alone names nobody: the system gives it to the next process. So a process is known by its pid
and its `birth` (when it was started), and only a process whose birth agrees is ever signalled.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from embedded.errors import EmbeddedError

LOG_LIMIT = 10 * 1024 * 1024
FULL = 1024 * 1024  # bytes left on a disk that is as good as full

# Linux kills the process when its parent dies, however the parent dies. Run as a program of its
# own and not as a preexec_fn, which may deadlock when another thread holds a lock at the fork. The
# parent may be gone before the request is made, hence the second look at it.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
except (OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def birth_of(pid: int) -> str | None:
    """When the process was started, as a word to compare, or None if there is no such process."""
    try:
        if sys.platform == "linux":
            # Ticks since boot do not move when the wall clock is set; psutil's creation time does.
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            fields = stat.rpartition(")")[2].split()  # from the third on: the name may hold anything
            state, ticks = fields[0], fields[19]
            return None if state in ("Z", "X") else f"{boot}:{ticks}"
    except (OSError, ValueError, IndexError):
        pass  # no /proc here, or the process went away: psutil knows
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.2f}"
    except psutil.Error:
        return None


def belongs_to(pid: int, birth: str, home: Path) -> bool:
    """Whether this is still the process that we started, on this home.

    A recycled pid has another birth; the home is asked for too, so that a wrong note can never
    reach further than this folder.
    """
    if birth_of(pid) != birth:
        return False
    try:
        process = psutil.Process(pid)
        if any(str(home) in word for word in process.cmdline()):
            return True
        return process.environ().get("SAISEI_HOME") == str(home)
    except psutil.Error:
        return False


def terminate(pid: int, birth: str, grace: float) -> None:
    """SIGTERM, and SIGKILL after `grace` seconds, to exactly the process of that birth; returns
    once it is gone.
    """
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        if birth_of(pid) != birth:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + patience
        while birth_of(pid) == birth and time.monotonic() < deadline:
            time.sleep(0.02)


class ManagedProcess:
    """A process that we start, watch, stop and start again, with its output appended to one log
    file.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        die_with_parent: bool = True,
    ) -> None:
        """Start the command; it gets no input, and a process group of its own so that Ctrl-C
        reaches only us.

        With `die_with_parent` Linux kills it when the thread that called this ends, so only the
        main thread asks.

        Raises:
            EmbeddedError: the log cannot be written or the program cannot be run.
        """
        tied = die_with_parent and sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        if tied:
            command = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _DIE_WITH_PARENT,
                str(os.getpid()),
                *command,
            ]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and self.log.stat().st_size > LOG_LIMIT:
                self.log.replace(self.log.with_suffix(".log.1"))
            with self.log.open("ab") as output:
                self._log_from = output.tell()
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    cwd=cwd,
                    process_group=0,
                )
        except OSError as error:
            raise EmbeddedError(f"{self.name} cannot be started: {error}.") from error

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last run (negative: the signal), or None while it runs or before it
        ever ran.
        """
        return self._process.poll() if self._process is not None else None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process group; returns at once."""
        self._signal(signal.SIGTERM)

    def stop(self, grace: float = 10.0) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; returns once the process is gone."""
        self.ask_to_stop()
        if self._process is not None:
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # poll() first: a process that was waited for has given its pid away.
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def output(self, limit: int = 64 * 1024) -> str:
        """The last `limit` bytes that this run wrote to its log."""
        try:
            with self.log.open("rb") as source:
                end = source.seek(0, os.SEEK_END)
                source.seek(max(self._log_from, end - limit))
                return source.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def last_words(self, lines: int = 3) -> str:
        """The last lines of this run's log in one line, for a sentence that says why it failed."""
        said = [line.strip() for line in self.output(4096).splitlines() if line.strip()]
        words = " / ".join(said[-lines:]) or "it wrote nothing"
        # On a full disk the log, too, stays empty.
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.log.parent).free < FULL:
                words += f"; the disk that holds {self.log.parent.parent} is full"
        return words

"""The stack as its users see it: start one, find one, keep one, stop one."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from embedded._process import belongs_to, birth_of
from embedded._state import READY, Child, Note, Order, environment, live_note, read_note
from embedded.errors import AlreadyRunning, EmbeddedError

ROOT = Path(__file__).resolve().parent.parent

# Guards that outlive this process: held here, since a collected Popen complains about a child that
# still runs.
_kept: list[subprocess.Popen[bytes]] = []


class Stack:
    """The servers of one home and the guard that owns them.

    As a context manager it is closed at the end: stopped if it is attached to this process, left
    alone if not.
    """

    def __init__(self, home: Path, note: Note, guard: subprocess.Popen[bytes] | None = None) -> None:
        self.home = home
        self._first = note
        self._guard = guard

    @property
    def temporal_address(self) -> str | None:
        """host:port of Temporal, or None if this stack has none."""
        return self._first.temporal_address

    @property
    def ui_url(self) -> str | None:
        """The Web UI, or None without Temporal or when headless."""
        return self._first.ui_url

    @property
    def redis_url(self) -> str | None:
        """redis:// address of Valkey, or None if this stack has none."""
        return self._first.redis_url

    def url(self, child: str) -> str | None:
        """Where that child answers, or None if this stack has none of that name or it serves
        nothing.
        """
        return self._first.urls.get(child)

    @property
    def guard_pid(self) -> int:
        """The process id of the guard."""
        return self._first.guard.pid

    @property
    def pids(self) -> dict[str, int]:
        """name -> process id of what runs now; a restart by the guard changes it."""
        note = read_note(self.home)
        if note is None or note.guard != self._first.guard:
            return {}
        return {name: process.pid for name, process in note.processes.items()}

    @property
    def failing(self) -> list[str]:
        """The names of what dies again and again; the guard goes on trying, ever more slowly."""
        note = read_note(self.home)
        return [] if note is None or note.guard != self._first.guard else list(note.failing)

    @property
    def attached(self) -> bool:
        """Whether the stack ends with this process."""
        return self._guard is not None

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (this process's environment by default) with SAISEI_HOME, TEMPORAL_ADDRESS,
        REDIS_URL in it.
        """
        return environment(self.home, self._first, os.environ if base is None else base)

    def keep(self) -> None:
        """Let the stack outlive this process; it runs until `stop(home)`.

        Raises:
            EmbeddedError: the guard is gone or does not answer.
        """
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(b"keep\n")
            self._guard.stdin.flush()
        except OSError as error:
            raise EmbeddedError(f"The guard of {self.home} is gone.") from error
        if _hear(self._guard, 10.0) != "kept":
            raise EmbeddedError(f"The guard of {self.home} does not answer.")
        _close_pipes(self._guard)
        _kept.append(self._guard)
        self._guard = None

    def close(self, timeout: float = 40.0) -> None:
        """Stop the stack if it is attached to this process, and wait for the end; otherwise do
        nothing.
        """
        guard, self._guard = self._guard, None
        if guard is not None:
            _end(guard, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start(
    home: Path | str,
    *,
    services: Sequence[str] = ("temporal", "valkey"),
    children: Sequence[Child] = (),
    search_attributes: Mapping[str, str] | None = None,
    dynamic_config: Mapping[str, int | str | bool] | None = None,
    headless: bool = False,
    detached: bool = False,
    temporal_port: int | None = None,
    ui_port: int | None = None,
    redis_port: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Stack:
    """Start the servers and then the children below a guard, and return once all of them are ready.

    Args:
        home: the folder of all data, logs and notes; made if it is missing.
        services: which of `temporal` and `valkey`.
        children: commands that run beside them, with the stack's environment.
        search_attributes: name -> type (`Keyword`, `Int`, ...), registered with Temporal.
        dynamic_config: Temporal's settings on top of those that were measured to matter.
        headless: no Web UI.
        detached: it outlives this process, until `stop(home)`; otherwise it ends with it.
        temporal_port, ui_port, redis_port: None for the former port of this home or a free one.
        env: added to this process's environment for the children.
        timeout: seconds that each server and child gets to become ready.

    Raises:
        AlreadyRunning: a live guard holds this home.
        EmbeddedError: anything else that keeps it from starting; nothing is left running then.
    """
    unknown = set(services) - {"temporal", "valkey"}
    if unknown:
        raise EmbeddedError(f"No embedded server is called {sorted(unknown)[0]!r}.")
    home = Path(home).expanduser().resolve()
    order = Order(
        services=list(services),
        children=list(children),
        search_attributes=dict(search_attributes or {}),
        dynamic_config=dict(dynamic_config or {}),
        headless=headless,
        temporal_port=temporal_port,
        ui_port=ui_port,
        redis_port=redis_port,
        cwd=os.getcwd(),
        timeout=timeout,
    )
    guard = _spawn_guard(home, env or {})
    try:
        assert guard.stdin is not None
        with contextlib.suppress(OSError):  # a guard that ended already has said why, or says nothing below
            guard.stdin.write(order.to_json().encode() + b"\n")
            guard.stdin.flush()
        said = _hear(guard, timeout * (2 + len(children)) + 30.0)
        kind, _, why = said.partition(" ")
        if kind == "running":
            raise AlreadyRunning(why)
        if kind == "failed":
            raise EmbeddedError(why)
        note = read_note(home)
        if kind != "ready" or note is None:
            raise EmbeddedError(f"The guard ended without a word (log: {home}/logs/guard.log).")
        stack = Stack(home, note, guard)
        if detached:
            stack.keep()
        return stack
    except BaseException:  # also Ctrl-C: what was started half is stopped
        _end(guard, 40.0)
        raise


def find(home: Path | str) -> Stack | None:
    """The live stack of this home, started by whomever, or None. It is not attached to this
    process.
    """
    home = Path(home).expanduser().resolve()
    note = live_note(home)
    return None if note is None or note.state != READY else Stack(home, note)


def stop(home: Path | str, timeout: float = 40.0) -> bool:
    """Stop the stack of this home and wait for its end; False if there was none.

    Raises:
        EmbeddedError: it did not end within `timeout` seconds.
    """
    home = Path(home).expanduser().resolve()
    note = live_note(home)
    if note is None:
        return False
    guard = note.guard
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while belongs_to(guard.pid, guard.birth, home) and birth_of(guard.pid) == guard.birth:
        if time.monotonic() > deadline:
            raise EmbeddedError(f"The stack on {home} did not end within {timeout:g} s (log: {home}/logs/guard.log).")
        time.sleep(0.02)
    for kept in list(_kept):
        if kept.poll() is not None:
            _kept.remove(kept)
    return True


def _spawn_guard(home: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    log = home / "logs" / "guard.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "embedded", "guard", "--home", str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **env, "SAISEI_HOME": str(home)},
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
            )
    except OSError as error:
        raise EmbeddedError(
            f"The home {home} cannot be written ({error.strerror}); set SAISEI_HOME to a folder that you may write."
        ) from error


def _hear(guard: subprocess.Popen[bytes], timeout: float) -> str:
    """The next line of the guard, or "" if it ends or says nothing in time."""
    assert guard.stdout is not None
    said, deadline = b"", time.monotonic() + timeout
    while not said.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([guard.stdout], [], [], left)[0]:
            return ""
        chunk = os.read(guard.stdout.fileno(), 4096)
        if not chunk:
            return ""
        said += chunk
    return said.decode(errors="replace").strip()


def _end(guard: subprocess.Popen[bytes], timeout: float) -> None:
    """Close the pipe, which tells the guard to stop everything, and wait for its end."""
    _close_pipes(guard)
    try:
        guard.wait(timeout)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _close_pipes(guard: subprocess.Popen[bytes]) -> None:
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()

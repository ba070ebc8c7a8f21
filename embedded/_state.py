"""What a guard and the processes around it tell each other: the lock, the note, the order.

`run/guard.lock` is held by a live guard, so that two can never share a home. `run/stack.json` says
what runs; it is written before anybody may rely on it, and outlives a guard that is killed: the
next one reads from it what to clear away.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from embedded._process import belongs_to
from embedded.errors import AlreadyRunning, EmbeddedError

STARTING, READY, STOPPING = "starting", "ready", "stopping"
_MOMENT = 2.0  # seconds


@dataclass(frozen=True)
class Child:
    """A command that runs beside the servers, such as the worker.

    `env` is added to the stack's environment. With `ready_line` the stack is ready only once the
    command has written that text to its log; without it, as soon as it has been started. `url`:
    where it will answer, for whoever finds the stack.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_line: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class Order:
    """What a guard is told to run."""

    services: Sequence[str]
    children: Sequence[Child]
    search_attributes: Mapping[str, str]
    dynamic_config: Mapping[str, int | str | bool]
    headless: bool
    temporal_port: int | None
    ui_port: int | None
    redis_port: int | None
    cwd: str
    timeout: float

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """The order that `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        return cls(**{**raw, "children": [Child(**child) for child in raw["children"]]})


@dataclass(frozen=True)
class Process:
    """A process as it was started: the pid and, because pids are recycled, its birth."""

    pid: int
    birth: str


@dataclass(frozen=True)
class Note:
    """The content of `run/stack.json`."""

    state: str
    guard: Process
    attached: bool
    processes: Mapping[str, Process] = field(default_factory=dict)
    temporal_address: str | None = None
    ui_url: str | None = None
    redis_url: str | None = None
    failing: Sequence[str] = ()
    urls: Mapping[str, str] = field(default_factory=dict)


def environment(home: Path, note: Note, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the addresses of the stack in it, for a process that shall use the stack.

    The embedded Temporal has neither TLS nor keys, so what the user's profile says of them is left
    out.
    """
    env = dict(base) | {"SAISEI_HOME": str(home)}
    if note.temporal_address is not None:
        env = {k: v for k, v in env.items() if not k.startswith("TEMPORAL_")}
        env |= {"TEMPORAL_ADDRESS": note.temporal_address, "TEMPORAL_CONFIG_FILE": os.devnull}
        if note.ui_url is not None:
            env["SAISEI_UI_URL"] = note.ui_url
    if note.redis_url is not None:
        env["REDIS_URL"] = note.redis_url
    return env


def note_path(home: Path) -> Path:
    """Where the note of this home is."""
    return home / "run" / "stack.json"


def write_note(home: Path, note: Note) -> None:
    """Replace the note in one step, so that a reader never sees half of it.

    Raises:
        EmbeddedError: the home cannot be written.
    """
    path = note_path(home)
    temporary = path.with_name(f"stack.json.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(note), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise EmbeddedError(f"{path} cannot be written: {error.strerror}.") from error


def read_note(home: Path) -> Note | None:
    """The note of this home, or None if there is none that can be read."""
    try:
        raw = json.loads(note_path(home).read_text(encoding="utf-8"))
        # Written by another version, it may say more than we know; its guard must be found and stopped all the same.
        known = {each.name for each in fields(Note)}
        return Note(
            **{
                **{name: value for name, value in raw.items() if name in known},
                "guard": Process(**raw["guard"]),
                "processes": {k: Process(**v) for k, v in raw["processes"].items()},
            }
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remove_note(home: Path) -> None:
    """Forget the stack of this home."""
    with contextlib.suppress(OSError):
        note_path(home).unlink()


def live_note(home: Path) -> Note | None:
    """The note of this home if its guard is alive and holds its lock."""
    note = read_note(home)
    if note is None or not belongs_to(note.guard.pid, note.guard.birth, home):
        return None
    return note if _is_held(home) else None


def hold_lock(home: Path, patience: float = 40.0) -> int:
    """Take the guard's lock of this home and return its descriptor, which holds it until the
    process ends.

    A guard that is stopping is waited for, at most `patience` seconds: the next `make demo` may
    come at once.

    Raises:
        AlreadyRunning: a live guard holds the lock.
        EmbeddedError: the home cannot be written.
    """
    path = home / "run" / "guard.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EmbeddedError(
            f"The home {home} cannot be written ({error.strerror}); set SAISEI_HOME to a folder that you may write."
        ) from error
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            waited = time.monotonic() - began
            note = read_note(home)
            # One that stops notes so, and forgets its note before it lets go.
            live = note is not None and note.state != STOPPING
            # A moment also for a live one: `find` looks at the lock by taking it for an instant, and
            # a guard whose parent has just gone may not have noted that yet.
            if waited > (_MOMENT if live else patience):
                os.close(lock)
                raise AlreadyRunning(
                    f"A stack is running already on {home}; use it, or stop it with `make down`."
                ) from None
            time.sleep(0.02)
        except OSError as error:
            os.close(lock)
            raise EmbeddedError(f"{path} cannot be locked: {error.strerror}.") from error


def _is_held(home: Path) -> bool:
    try:
        lock = os.open(home / "run" / "guard.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)

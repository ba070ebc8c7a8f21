"""The guard: the process that owns the servers, so that they end when nobody wants them any more.

Attached, it ends when the pipe from its parent closes or its parent is gone; kept, it lives until
SIGTERM. It starts again what dies under it, on the same data and ports. Everything happens in one
thread, in `_pump`.
"""

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from embedded._process import ManagedProcess, belongs_to, birth_of, terminate
from embedded._servers import Server, TemporalServer, ValkeyServer
from embedded._state import (
    READY,
    STARTING,
    STOPPING,
    Child,
    Note,
    Order,
    Process,
    environment,
    hold_lock,
    read_note,
    remove_note,
    write_note,
)
from embedded.errors import AlreadyRunning, EmbeddedError

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds before a restart, doubling
STEADY = 10.0  # seconds that a process must run for its deaths to be forgotten
FAILING = 4  # deaths in a row
CHILD_GRACE, SERVER_GRACE = 20.0, 10.0  # seconds from SIGTERM to SIGKILL
REASONS_TO_STOP = (signal.SIGTERM, signal.SIGHUP)


class _Stop(Exception):
    """The guard was told to end, or its parent is gone."""


class Unit:
    """Something that the guard keeps running.

    It is never given up: what keeps it from running (a full disk, a database that is away) may pass
    while nobody looks. But the pauses grow, and after a few deaths it is called failing.
    """

    def __init__(self, process: ManagedProcess, start: Callable[[], None]) -> None:
        self.process = process
        self._start = start
        self._deaths = 0  # in a row, each soon after the start
        self._started_at = 0.0
        self._next_start: float | None = None

    @property
    def failing(self) -> bool:
        """Whether it died so often in a row that a person should look."""
        return self._deaths >= FAILING

    def start(self, now: float) -> None:
        """Start it for the first time or again."""
        self._started_at = now
        self._start()

    def watch(self, now: float) -> bool:
        """Start it again if it died and its pause is over; whether anything changed."""
        if self.process.running:
            if self._deaths and now - self._started_at > STEADY:
                self._deaths = 0
                return True
            return False
        if self._next_start is None:
            self._deaths += 1
            pause = min(FIRST_PAUSE * 2 ** min(self._deaths - 1, 20), LONGEST_PAUSE)
            self._next_start = now + pause
            say(
                f"{self.process.name} ended with exit code {self.process.exit_code}"
                + (f", {self._deaths} times in a row" if self._deaths > 1 else "")
                + f"; starting it again in {pause:g} s."
                + (f" Its last words: {self.process.last_words()}" if self.failing else "")
            )
            return True
        if now < self._next_start:
            return False
        self._next_start = None
        try:
            self.start(now)
        except EmbeddedError as error:
            say(str(error))  # counts as a death at the next look
            return False
        say(f"{self.process.name} is running again, pid {self.process.pid}.")
        return True


class Guard:
    """Runs one order on one home, from the lock to the last process gone."""

    def __init__(self, home: Path, order: Order, control: int, report: int) -> None:
        self._home = home
        self._order = order
        self._control = control
        self._report = report
        self._parent = os.getppid()
        self._attached = True
        self._asked_to_stop = False
        self._heard = b""
        self._temporal: TemporalServer | None = None
        self._valkey: ValkeyServer | None = None
        self._units: list[Unit] = []
        self._me = Process(os.getpid(), birth_of(os.getpid()) or "")

    def run(self) -> None:
        """Start everything, report, watch until told to stop, stop everything.

        Raises:
            EmbeddedError: it could not start; whatever had been started is stopped again.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in REASONS_TO_STOP:
            signal.signal(number, self._on_signal)
        try:
            clear_leftovers(self._home)
            self._start_all()
            self._write(READY)
            self._tell("ready")
            say("ready.")
            while True:
                self._pump(1.0)
                if any([unit.watch(time.monotonic()) for unit in self._units]):
                    self._write(READY)
        except _Stop:
            say("stopping.")
        finally:
            self._stop_all()

    def _start_all(self) -> None:
        order = self._order
        servers: list[Server] = []
        if "valkey" in order.services:
            self._valkey = ValkeyServer(self._home, port=order.redis_port)
            servers.append(self._valkey)
        if "temporal" in order.services:
            self._temporal = TemporalServer(
                self._home,
                port=order.temporal_port,
                ui_port=order.ui_port,
                headless=order.headless,
                search_attributes=order.search_attributes,
                dynamic_config=order.dynamic_config,
            )
            servers.append(self._temporal)
        for server in servers:
            self._add(server.process, server.start)
        for server in servers:
            self._wait(server.poll_ready, server.process)
        # A race for a port may have changed a pid, and the children are told the addresses.
        self._write(STARTING)
        for child in order.children:
            process = ManagedProcess(child.name, self._home / "logs" / f"{child.name}.log")
            self._add(process, self._starter(child, process))
            if child.ready_line is not None:
                self._wait(partial(_has_said, process, child.ready_line), process)

    def _add(self, process: ManagedProcess, start: Callable[[], None]) -> None:
        self._units.append(Unit(process, start))
        self._units[-1].start(time.monotonic())
        self._write(STARTING)

    def _starter(self, child: Child, process: ManagedProcess) -> Callable[[], None]:
        def start() -> None:
            env = environment(self._home, self._note(READY), os.environ) | dict(child.env)
            process.spawn(child.command, env=env, cwd=Path(self._order.cwd))

        return start

    def _wait(self, is_ready: Callable[[], bool], process: ManagedProcess) -> None:
        deadline = time.monotonic() + self._order.timeout
        while not is_ready():
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"{process.name} was not ready within {self._order.timeout:g} s: "
                    f"{process.last_words()} (log: {process.log})."
                )
            self._pump(0.02)
            for unit in self._units:
                if unit.process is not process:
                    unit.watch(time.monotonic())

    def _pump(self, seconds: float) -> None:
        """Let time pass, and listen: to the pipe, to the signals, to the parent's end and to our
        children's.
        """
        if self._asked_to_stop:
            raise _Stop
        # A died child interrupts nothing here, so the wait is short while something is to be
        # started again.
        until = time.monotonic() + seconds
        while True:
            if self._attached and os.getppid() != self._parent:
                # The pipe may be held open by a process that the parent forked.
                raise _Stop
            left = min(until - time.monotonic(), 0.1)
            if left <= 0:
                return
            readable = [self._control] if self._control >= 0 else []
            if select.select(readable, [], [], left)[0]:
                self._listen()
            if self._asked_to_stop:
                raise _Stop
            if any(not u.process.running for u in self._units):
                time.sleep(min(0.02, max(left, 0)))
                return

    def _listen(self) -> None:
        heard = os.read(self._control, 4096)
        if not heard:
            if self._attached:
                raise _Stop
            os.close(self._control)
            self._control = -1
            return
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            if line == b"stop":
                raise _Stop
            if line == b"keep":
                self._attached = False
                self._write(READY)
                self._tell("kept")
                say("kept: it lives until it is stopped.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True

    def _note(self, state: str) -> Note:
        running = [(u.process.name, u.process.pid) for u in self._units]
        temporal, valkey = self._temporal, self._valkey
        up = state == READY  # before that a port may still change
        return Note(
            state=state,
            guard=self._me,
            attached=self._attached,
            processes={n: Process(p, birth_of(p) or "") for n, p in running if p is not None},
            temporal_address=temporal.address if up and temporal else None,
            ui_url=temporal.ui_url if up and temporal else None,
            redis_url=valkey.url if up and valkey else None,
            failing=[u.process.name for u in self._units if u.failing],
            urls={child.name: child.url for child in self._order.children if child.url is not None},
        )

    def _write(self, state: str) -> None:
        try:
            write_note(self._home, self._note(state))
        except EmbeddedError as error:
            if state == STARTING:
                raise
            say(str(error))  # a full disk must not take the servers down with it

    def _tell(self, what: str) -> None:
        # The parent may be gone, which the pipe tells us next.
        with contextlib.suppress(OSError):
            os.write(self._report, what.encode() + b"\n")

    def _stop_all(self) -> None:
        for number in REASONS_TO_STOP:
            signal.signal(number, signal.SIG_IGN)
        if self._units:
            self._write(STOPPING)
        servers = {"temporal", "valkey"}
        children = [u.process for u in self._units if u.process.name not in servers]
        _stop_together(children, CHILD_GRACE)  # first, while what they talk to still answers
        _stop_together([u.process for u in self._units if u.process.name in servers], SERVER_GRACE)
        remove_note(self._home)
        say("stopped.")


def _has_said(process: ManagedProcess, line: str) -> bool:
    if line in process.output():
        return True
    if not process.running:
        raise EmbeddedError(
            f"{process.name} ended with exit code {process.exit_code} before it was ready: "
            f"{process.last_words()} (log: {process.log})."
        )
    return False


def _stop_together(processes: list[ManagedProcess], grace: float) -> None:
    for process in processes:
        process.ask_to_stop()
    deadline = time.monotonic() + grace
    for process in processes:
        process.stop(max(deadline - time.monotonic(), 0.1))


def clear_leftovers(home: Path) -> None:
    """Stop what a dead guard of this home left running, and only that; we hold its lock, so it is
    dead.
    """
    note = read_note(home)
    if note is None:
        return
    for name, process in note.processes.items():
        if belongs_to(process.pid, process.birth, home):
            say(f"stopping {name} (pid {process.pid}), left behind by a guard that died.")
            terminate(process.pid, process.birth, SERVER_GRACE)
    remove_note(home)


def say(what: str) -> None:
    """One line into the guard's log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):
        print(f"{stamp} guard {os.getpid()}: {what}", file=sys.stderr, flush=True)


def main(home: Path) -> int:
    """Read the order from standard input, run it, and answer on standard output: `ready`, or why
    not.
    """
    control, report = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    first = b""
    while not first.endswith(b"\n"):
        byte = os.read(control, 1)  # one at a time: what follows the line is for the guard
        if not byte:
            return 1
        first += byte
    try:
        lock = hold_lock(home)
        Guard(home, Order.from_json(first.decode()), control, report).run()
        os.close(lock)
    except AlreadyRunning as error:
        return _refuse(report, "running", str(error))
    except EmbeddedError as error:
        return _refuse(report, "failed", str(error))
    except Exception as error:  # nothing may end without a word to the parent
        traceback.print_exc()
        return _refuse(report, "failed", f"The guard failed: {error!r} (log: {home}/logs/guard.log).")
    return 0


def _refuse(report: int, kind: str, why: str) -> int:
    say(why)
    with contextlib.suppress(OSError):
        os.write(report, f"{kind} {' '.join(why.split())}\n".encode())
    return 1

"""A fair write lock beside an SQLite database file.

SQLite's own waiting is unfair: a process that commits batches back to back starved a second writer for 3 to 10 s.
So each write transaction first takes this lock, by turn: threads of one process queue first come, first served, and
the one at their head competes with other processes through two lock files. `turn` is taken before `writer` and let
go once `writer` is held; whoever just wrote finds `turn` held by the one who waits, and comes after it.
`flock` is let go by the kernel when a process dies, so a killed writer never leaves the lock behind.

Turns alone are fair to transactions of one length. Beside a drain, whose transactions last 16 ms, intake with its 0.5
got one order in for each of them. So a process that kept others waiting leaves them the lock for as long as it held it
itself, while they use it. Time in which they hold it is what counts: orders over HTTP hold it half of the time, since
each client waits for its answer before it sends the next.
"""

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from contracts.errors import StoreBusy

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002
_LOOK = 0.0005  # seconds between two looks whether the others still write
_LONGEST = 0.050  # seconds of standing back: a receiver that was slow for a minute must not do so for one
_QUIET = 0.25  # of what is owed: when nobody has written for so long, nobody wants the rest


class FairLock:
    """Held by at most one thread of all processes that name the same `path`; waits up to `timeout` seconds."""

    def __init__(self, path: str, timeout: float) -> None:
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._queue: deque[threading.Event] = deque()  # its first one holds the lock, or is about to
        self._owner: int | None = None
        self._released = 0.0
        self._owed = 0.0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._turn = os.open(f"{path}-turn", flags, 0o644)
        self._writer = os.open(f"{path}-writer", flags, 0o644)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the block. Raises StoreBusy after the timeout, RuntimeError when nested."""
        if self._owner == threading.get_ident():
            raise RuntimeError("a write transaction inside a write transaction would wait for itself")
        deadline = time.monotonic() + self._timeout
        ticket = threading.Event()
        # A time-out or a shutdown may raise in this thread at any line, so one clean-up undoes whatever was reached.
        try:
            self._await_head(ticket, deadline)
            self._owner = threading.get_ident()
            self._stand_back()
            try:
                self._flock(self._turn, deadline)
                self._flock(self._writer, deadline)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            begun = time.monotonic()
            try:
                yield
            finally:
                self._released = time.monotonic()
                self._owed = 0.0 if self._is_free(self._turn) else self._released - begun
        finally:
            try:
                self._leave(ticket)
            finally:
                self._leave(ticket)  # a thread that is stopped within the first call; else it changes nothing

    def close(self) -> None:
        """Give the two files back. Nobody may hold or want the lock any more."""
        os.close(self._turn)
        os.close(self._writer)

    def _stand_back(self) -> None:
        """Leave the others the lock for the time that is owed to them, while they use it."""
        left = self._owed
        seen = now = time.monotonic()
        end = self._released + _LONGEST
        while left > 0 and now < end and now - seen < self._owed * _QUIET:
            busy = not self._is_free(self._writer)
            time.sleep(_LOOK)
            looked, now = now, time.monotonic()
            if busy:
                seen = now
                left -= now - looked

    @staticmethod
    def _is_free(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return True

    def _await_head(self, ticket: threading.Event, deadline: float) -> None:
        with self._mutex:
            self._queue.append(ticket)
            if self._queue[0] is ticket:
                return
        if not ticket.wait(max(0.0, deadline - time.monotonic())):
            raise StoreBusy(self._sentence())

    def _leave(self, ticket: threading.Event) -> None:
        with self._mutex:
            if self._queue and self._queue[0] is ticket:
                self._owner = None
                fcntl.flock(self._writer, fcntl.LOCK_UN)
                self._queue.popleft()
            elif ticket in self._queue:
                self._queue.remove(ticket)
            if self._queue:
                self._queue[0].set()  # handed over directly: a newcomer cannot slip in

    def _flock(self, descriptor: int, deadline: float) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # A blocking flock has no time-out: one stopped process would hang all others without a word.
                if time.monotonic() >= deadline:
                    raise StoreBusy(self._sentence()) from None
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    def _sentence(self) -> str:
        return (
            f"the database's write lock was not free for {self._timeout:g} s; "
            "see whether one of Saisei's processes is stopped, and try again"
        )

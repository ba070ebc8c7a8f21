"""Where a worker's database and network calls run, so that its event loop never blocks.

SQLite has one writer, and Python one interpreter lock: five threads that wrote in competition lost 16 % against one
thread that takes everyone's pieces in turn. So pieces of work queue for one thread there, and those that wait at the
same time share a transaction: what costs most is its commit, and the turn at the lock. On PostgreSQL a few threads
write side by side, a piece a transaction, since strangers in one transaction would hold each other's row locks. Reads
and network calls have threads of their own and overlap with it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from contracts.errors import TransactionLost
from store.engine import Changes, Database

T = TypeVar("T")

# Nothing joins a transaction that is older than this (seconds): whoever places an order waits for one at most.
_JOINABLE = 0.010


class _Piece(Generic[T]):
    """Work that waits for a transaction, and its answer, which is given once that has ended."""

    def __init__(self, work: Callable[[Connection], T]) -> None:
        self.answer: Future[tuple[T, float]] = Future()
        self._work = work
        self._seconds = 0.0
        self._result: T
        self._error: Exception | None = None

    def run(self, connection: Connection, *, first: bool) -> None:
        """If it raises, nothing of it stays, and the error is its own, not that of the pieces before it.

        Raises what it raised when it is the `first` one: then the transaction is taken back. Else what the database
        raises when there is no way back to its savepoint: then the transaction is lost.
        """
        begun = time.monotonic()
        savepoint = None if first else connection.begin_nested()
        try:
            self._result = self._work(connection)
        except Exception as error:
            if savepoint is None or isinstance(error, TransactionLost):
                raise
            savepoint.rollback()
            self._error = error
        else:
            if savepoint is not None:
                savepoint.commit()
        self._seconds = time.monotonic() - begun

    def conclude(self, commit_seconds: float) -> None:
        """Answer: the transaction is committed."""
        if self._error is not None:
            self.answer.set_exception(self._error)
        else:
            self.answer.set_result((self._result, self._seconds + commit_seconds))


class Writer:
    """Runs functions over one Database; each `read` is a snapshot, each `write` all or nothing, and durable when it
    answers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[_Piece[Any]] = deque()
        self._joinable = _JOINABLE if database.writers == 1 else 0.0
        self._writers = ThreadPoolExecutor(database.writers, thread_name_prefix="saisei-writer")
        self._others = ThreadPoolExecutor(16, thread_name_prefix="saisei-io")

    async def write(self, work: Callable[[Connection], T], *, patience: float = 0.0) -> T:
        """The result of `work` once what it wrote is committed, or what it raised, and then nothing of it is kept.

        It may share the transaction with others, who see it and are not harmed by it. For `patience` seconds it waits
        for others to come, where transactions are shared. If the caller is cancelled, work that has begun still ends by
        itself.
        """
        return (await self.timed_write(work, patience=patience))[0]

    async def timed_write(self, work: Callable[[Connection], T], *, patience: float = 0.0) -> tuple[T, float]:
        """`write`, and for how many seconds it kept others from writing: its own time and that of the commit."""
        piece = _Piece(work)
        self._waiting.append(piece)
        answer = asyncio.wrap_future(piece.answer)
        try:
            if patience and self._joinable:
                await asyncio.wait([answer], timeout=patience)
            if not answer.done():
                self._writers.submit(self._write_waiting)
        except BaseException:  # closed, or cancelled: who is told so must not find it done by a thread that still runs
            piece.answer.cancel()
            answer.cancel()
            raise
        return await answer

    def _write_waiting(self) -> None:
        """One transaction for the pieces that wait or come while it is young; others are left to the next one."""
        if not self._waiting:
            return  # they were taken along before
        group: list[_Piece[Any]] = []
        try:
            with self._database.write() as connection:
                until = time.monotonic() + self._joinable
                while (piece := self._next()) is not None:
                    group.append(piece)
                    piece.run(connection, first=len(group) == 1)
                    if time.monotonic() >= until:
                        break
                done = time.monotonic()
            commit_seconds = time.monotonic() - done
        except BaseException as error:
            # What all of them did is taken back. If the transaction never began, whoever waits for the next one would
            # only wait as long again, one after the other.
            for piece in group or list(iter(self._next, None)):  # a list: whoever is told may come again at once
                piece.answer.set_exception(error)
        else:
            for piece in group:
                piece.conclude(commit_seconds)

    def _next(self) -> _Piece[Any] | None:
        """The piece that waits longest; one that nobody waits for any more is dropped."""
        while self._waiting:
            try:
                piece = self._waiting.popleft()
            except IndexError:  # another thread was quicker
                break
            if piece.answer.set_running_or_notify_cancel():
                return piece
        return None

    def changes(self) -> Changes:
        """A watch over what anybody commits to the database; asking it takes no thread."""
        return self._database.changes()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in a read-only snapshot."""

        def snapshot() -> T:
            with self._database.read() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._others, snapshot)

    async def call(self, work: Callable[[], T]) -> T:
        """The result of a blocking call that holds no transaction (Redis, a payment provider)."""
        return await asyncio.get_running_loop().run_in_executor(self._others, work)

    def close(self) -> None:
        """Wait for what runs, and take nothing more."""
        self._writers.shutdown(wait=True)
        self._others.shutdown(wait=True)

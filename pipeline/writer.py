"""Where a worker's database and network calls run, so that its event loop never blocks.

SQLite has one writer, and Python one interpreter lock: five threads that wrote in competition lost 16 % against one
thread that takes everyone's batches in turn. So write transactions queue for one thread (a few on PostgreSQL, where
they really run side by side); reads and network calls have threads of their own and overlap with it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection

from store.engine import Changes, Database

T = TypeVar("T")


class Writer:
    """Runs functions over one Database; each `write` and `read` is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writers = ThreadPoolExecutor(database.writers, thread_name_prefix="saisei-writer")
        self._others = ThreadPoolExecutor(16, thread_name_prefix="saisei-io")

    async def write(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in a committed write transaction. If the caller is cancelled meanwhile, the
        transaction still ends by itself."""

        return (await self.timed_write(work))[0]

    async def timed_write(self, work: Callable[[Connection], T]) -> tuple[T, float]:
        """`write`, and for how many seconds it kept others from writing: from the lock to the end of the commit."""

        def transaction() -> tuple[T, float]:
            with self._database.write() as connection:
                begun = time.monotonic()
                result = work(connection)
            return result, time.monotonic() - begun

        return await asyncio.get_running_loop().run_in_executor(self._writers, transaction)

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

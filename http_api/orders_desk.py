"""Where the API's database work runs, so that its event loop never blocks: orders one after the other, reads beside.

An order waits a bounded time for its turn and then is told that the database is busy: a queue that only grows would
keep every caller waiting for an answer that comes too late.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection

from contracts.errors import StoreBusy
from contracts.orders import Order
from http_api.problems import OutcomeUnknown
from intake import Intake
from store.engine import Database
from store.orders import PlacedOrder

logger = logging.getLogger("saisei.api")

T = TypeVar("T")

_READERS = 8
_ANSWER_WITHIN = 10.0  # seconds that a transaction gets beyond its wait for the lock
_PREPARE_AGAIN = 1.0


class NotSetUp(StoreBusy):
    """The database has not answered since the API started, so its tables may be missing."""


class OrdersDesk:
    """One Database behind threads. An asynchronous context manager, which sets the database up and keeps trying where
    it does not answer yet; until then no order is taken."""

    def __init__(self, database: Database, intake: Intake, busy: float, set_up: Callable[[Connection], None]) -> None:
        """`busy`: seconds that an order waits for its turn, and then again for the write lock."""
        self._database = database
        self._intake = intake
        self._busy = busy
        self._set_up = set_up
        self._writers = ThreadPoolExecutor(database.writers, "saisei-intake")
        self._readers = ThreadPoolExecutor(_READERS, "saisei-read")
        # As many as there are threads, so that whoever has a turn starts at once and the wait can be bounded.
        self._turns = asyncio.Semaphore(database.writers)
        self._reads = asyncio.Semaphore(_READERS)
        self._prepared = False
        self._preparing: asyncio.Task[None] | None = None

    async def place(self, order: Order) -> PlacedOrder:
        """The durable order. Raises Conflict, IntakePaused, StoreBusy, OutcomeUnknown."""
        return await self._run(self._writers, self._turns, lambda: self._intake.place(order))

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in one read-only snapshot. Raises StoreBusy, OutcomeUnknown."""

        def snapshot() -> T:
            with self._database.read() as connection:
                return work(connection)

        return await self._run(self._readers, self._reads, snapshot)

    async def __aenter__(self) -> "OrdersDesk":
        self._preparing = asyncio.create_task(self._keep_preparing())
        # A moment, so that who is told "ready" finds it so; a database that is down does not hold the start up.
        await asyncio.wait([self._preparing], timeout=2 * _PREPARE_AGAIN)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._preparing is not None
        self._preparing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._preparing
        # What hangs in a dead database is left to the end of the process.
        for threads in (self._writers, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, threads: ThreadPoolExecutor, turns: asyncio.Semaphore, work: Callable[[], T]) -> T:
        if not self._prepared:
            raise NotSetUp("the database has not answered since the start")
        try:
            async with asyncio.timeout(self._busy):
                await turns.acquire()
        except TimeoutError:
            raise StoreBusy(f"no turn at the database within {self._busy:g} s") from None
        future = asyncio.get_running_loop().run_in_executor(threads, work)

        def ended(done: "asyncio.Future[T]") -> None:
            # Here and not where the caller waits: it may have given up, and its thread is still taken.
            turns.release()
            if not done.cancelled():
                done.exception()

        future.add_done_callback(ended)
        try:
            async with asyncio.timeout(self._busy + _ANSWER_WITHIN):
                return await asyncio.shield(future)
        except TimeoutError:
            raise OutcomeUnknown from None

    async def _keep_preparing(self) -> None:
        while not self._prepared:
            try:
                await asyncio.get_running_loop().run_in_executor(self._writers, self._prepare)
                self._prepared = True
            except Exception as error:
                logger.warning("the database cannot be set up: %s", str(error).partition("\n")[0])
                await asyncio.sleep(_PREPARE_AGAIN)

    def _prepare(self) -> None:
        with self._database.write() as connection:
            self._set_up(connection)

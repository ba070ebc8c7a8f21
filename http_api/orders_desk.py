"""Where the API's database work runs, so that its event loop never blocks: orders one after the other, reads beside.

Orders that come while a transaction commits, or while the next one waits for the write lock, go into that one together:
under load they share its wait for the disk, and one that comes alone waits for nobody.

An order waits a bounded time for its turn and then is told that the database is busy: a queue that only grows would
keep every caller waiting for an answer that comes too late.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar, cast

from sqlalchemy import Connection

from contracts.errors import Refused, StoreBusy
from contracts.orders import Order
from http_api.problems import OutcomeUnknown
from intake import Intake
from store.control import rewrite_control
from store.dialect import is_infrastructure_error
from store.engine import Database
from store.orders import PlacedOrder

logger = logging.getLogger("saisei.api")

T = TypeVar("T")

_READERS = 8
_ANSWER_WITHIN = 10.0  # seconds beyond that wait, for a transaction that has begun
_PREPARE_AGAIN = 1.0


_MOST_TOGETHER = 32  # orders of one transaction; it should last some 20 ms at most


@dataclass(eq=False)
class _Waiting:
    """An order on its way into the database."""

    order: Order
    answer: "asyncio.Future[PlacedOrder]"


class NotSetUp(StoreBusy):
    """The database has not answered since the API started, so its tables may be missing."""


class OrdersDesk:
    """One Database behind threads. An asynchronous context manager, which sets the database up and keeps trying where
    it does not answer yet; until then no order is taken."""

    def __init__(self, database: Database, intake: Intake, busy: float, set_up: Callable[[Connection], None]) -> None:
        """`busy`: seconds that an order waits for its turn, the write lock included."""
        self._database = database
        self._intake = intake
        self._busy = busy
        self._set_up = set_up
        self._writers = ThreadPoolExecutor(database.writers, "saisei-intake")
        self._readers = ThreadPoolExecutor(_READERS, "saisei-read")
        self._queue: deque[_Waiting] = deque()
        self._committing: set[asyncio.Task[None]] = set()
        # As many as there are threads, so that whoever has a turn starts at once and the wait can be bounded.
        self._reads = asyncio.Semaphore(_READERS)
        self._failed = False  # the last transaction of orders, by the database's own fault
        self._prepared = False
        self._preparing: asyncio.Task[None] | None = None

    async def place(self, order: Order) -> PlacedOrder:
        """The durable order. Raises Conflict, IntakePaused, StoreBusy, OutcomeUnknown."""
        self._require_prepared()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[PlacedOrder] = loop.create_future()
        mine = _Waiting(order, answer)
        limit = loop.call_later(self._busy, self._no_turn, mine)
        self._queue.append(mine)
        if len(self._committing) < self._database.writers:
            self._committing.add(loop.create_task(self._commit()))
        try:
            return await answer
        finally:
            limit.cancel()
            self._left_queue(mine)

    def _no_turn(self, waiting: _Waiting) -> None:
        if self._left_queue(waiting):
            _tell([waiting], [StoreBusy(f"no turn at the database within {self._busy:g} s")])
        else:
            asyncio.get_running_loop().call_later(_ANSWER_WITHIN, _tell, [waiting], [OutcomeUnknown()])

    def _left_queue(self, waiting: _Waiting) -> bool:
        """Whether it stood in the queue until now; else a transaction has taken it, and it may be durable already."""
        with contextlib.suppress(ValueError):
            self._queue.remove(waiting)
            return True
        return False

    def _take(self, group: list[_Waiting]) -> Sequence[Order]:
        """Move those who wait longest into the group; their orders. A transaction's thread calls it: who is taken out
        of the queue is in one place, since each call of a deque is one step for all threads."""
        with contextlib.suppress(IndexError):
            while len(group) < _MOST_TOGETHER:
                group.append(self._queue.popleft())
        return [each.order for each in group]

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in one read-only snapshot. Raises StoreBusy."""

        def snapshot() -> T:
            with self._database.read() as connection:
                return work(connection)

        self._require_prepared()
        try:
            async with asyncio.timeout(self._busy):
                await self._reads.acquire()
        except TimeoutError:
            raise StoreBusy(f"no turn at the database within {self._busy:g} s") from None
        future = asyncio.get_running_loop().run_in_executor(self._readers, snapshot)

        def ended(done: "asyncio.Future[T]") -> None:
            # Here and not where the caller waits: it may have given up, and its thread is still taken.
            self._reads.release()
            if not done.cancelled():
                done.exception()

        future.add_done_callback(ended)
        try:
            async with asyncio.timeout(self._busy + _ANSWER_WITHIN):
                return await asyncio.shield(future)
        except TimeoutError:
            raise StoreBusy(f"no answer to a read within {self._busy + _ANSWER_WITHIN:g} s") from None

    async def require_writes(self) -> None:
        """Raises Refused while the database takes no writes, as on a full disk: it is asked by a write that changes
        nothing, and only after an order could not be written. Who is told so sends no order that would show it."""
        if not self._failed:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._writers, self._write_nothing)
        except Exception as error:
            raise Refused(f"the database takes no writes: {str(error).partition(chr(10))[0]}") from error
        self._failed = False

    def _write_nothing(self) -> None:
        with self._database.write() as connection:
            rewrite_control(connection)

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

    def _require_prepared(self) -> None:
        if not self._prepared:
            raise NotSetUp("the database has not answered since the start")

    async def _commit(self) -> None:
        """Place all that wait, a group after the other, until nobody waits."""
        try:
            await self._commit_groups()
        finally:
            # In the same step as the last look at the queue: whoever comes between the two would count on this task.
            self._committing.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _commit_groups(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            group: list[_Waiting] = []
            answers: Iterable[PlacedOrder | Exception]
            try:
                answers = await loop.run_in_executor(self._writers, self._intake.place_all, partial(self._take, group))
                self._failed = False
            except Exception as error:
                if not group:  # it never began, and those who wait for the next one would only wait as long again
                    self._take(group)
                answers = repeat(error)
                self._failed |= is_infrastructure_error(error) and not isinstance(error, StoreBusy)
            _tell(group, answers)

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


def _tell(group: Iterable[_Waiting], answers: Iterable[PlacedOrder | Exception]) -> None:
    """Each its answer; one that has given up, or was told before, hears nothing more."""
    for each, answer in zip(group, answers, strict=False):
        if each.answer.done():
            continue
        if isinstance(answer, Exception):
            each.answer.set_exception(answer)
        else:
            each.answer.set_result(answer)

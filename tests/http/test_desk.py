"""The desk that places orders for the API: who comes while a transaction commits goes into the next, and nobody is
forgotten or waits for ever."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import Connection

from contracts.errors import Conflict, StoreBusy
from contracts.orders import Order
from http_api.orders_desk import OrdersDesk
from http_api.problems import OutcomeUnknown
from intake import Intake
from store.engine import Database
from store.orders import PlacedOrder
from tests.store.scenes import order, rows
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


class Slow(Intake):
    """Notes its groups, and commits the next one only when it may."""

    def __init__(self, database: Database) -> None:
        async def nobody() -> None: ...

        super().__init__(database, nobody)
        self.groups: list[list[str]] = []
        self.may = threading.Event()
        self.may.set()
        self.broken: Callable[[], Exception] | None = None

    def place_all(self, take: Callable[[], Sequence[Order]]) -> list[PlacedOrder | Exception]:
        def slowly() -> Sequence[Order]:
            orders = take()
            if orders:
                self.groups.append([each.id for each in orders])
            assert self.may.wait(60)
            if self.broken is not None:
                raise self.broken()
            return orders

        return super().place_all(slowly)


@asynccontextmanager
async def desk_of(database: Database, busy: float = 10.0) -> AsyncIterator[tuple[OrdersDesk, Slow]]:
    intake = Slow(database)

    def set_up(connection: Connection) -> None:
        """The database of a test is."""

    async with OrdersDesk(database, intake, busy, set_up) as desk:
        try:
            yield desk, intake
        finally:
            intake.may.set()


async def test_an_order_that_comes_right_after_an_answer_is_not_forgotten(database: Database) -> None:
    """The caller has its answer before the task that gave it has ended: it must not count on that one."""
    async with desk_of(database) as (desk, intake), asyncio.timeout(60):
        for number in range(1, 21):
            assert (await desk.place(order(number))).created
    assert intake.groups == [[f"order-{number}"] for number in range(1, 21)]


async def test_callers_that_never_pause_are_all_answered(sqlite: Database) -> None:
    async with desk_of(sqlite) as (desk, _), asyncio.timeout(60):

        async def caller(number: int) -> None:
            for turn in range(25):
                assert (await desk.place(order(1000 * number + turn + 1))).created

        await asyncio.gather(*(caller(number) for number in range(16)))
    assert len(rows(sqlite, "SELECT 1 FROM orders")) == 400


async def test_those_that_come_while_one_commits_share_the_next_transaction(sqlite: Database) -> None:
    async with desk_of(sqlite) as (desk, intake):
        intake.may.clear()
        first = asyncio.create_task(desk.place(order(1)))
        await eventually(lambda: intake.groups, 60, "the first one's transaction")
        placing = [order(2), order(3), order(2), order(3, qty=5), order(4)]
        others = [asyncio.create_task(desk.place(each)) for each in placing]
        await asyncio.sleep(0)
        intake.may.set()
        assert (await first).created
        answers = await asyncio.gather(*others, return_exceptions=True)
    assert intake.groups == [["order-1"], [each.id for each in placing]]
    assert [answer.created if isinstance(answer, PlacedOrder) else type(answer) for answer in answers] == [
        True,
        True,
        False,
        Conflict,
        True,
    ]


async def test_an_order_waits_a_bounded_time_for_its_turn_and_is_not_placed_afterwards(sqlite: Database) -> None:
    async with desk_of(sqlite, busy=0.2) as (desk, intake):
        intake.may.clear()
        first = asyncio.create_task(desk.place(order(1)))
        await eventually(lambda: intake.groups, 60, "the first one's transaction")
        with pytest.raises(StoreBusy, match=r"no turn at the database within 0\.2 s"):
            await desk.place(order(2))
        intake.may.set()
        assert (await first).created
        assert (await desk.place(order(3))).created
    assert intake.groups == [["order-1"], ["order-3"]]


async def test_who_is_not_answered_in_time_is_told_that_the_outcome_is_unknown(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_api.orders_desk._ANSWER_WITHIN", 0.1)
    async with desk_of(sqlite, busy=0.1) as (desk, intake):
        intake.may.clear()
        with pytest.raises(OutcomeUnknown):
            await desk.place(order(1))
        intake.may.set()
        placed = None
        async with asyncio.timeout(60):
            while placed is None:  # as the answers say: place it again as it is, while a slow disk holds it up
                with contextlib.suppress(StoreBusy, OutcomeUnknown):
                    placed = await desk.place(order(1))
    assert placed.order == order(1)
    assert len(rows(sqlite, "SELECT 1 FROM orders")) == 1


async def test_a_group_that_fails_as_a_whole_is_told_to_each_and_the_next_one_goes_on(sqlite: Database) -> None:
    async with desk_of(sqlite) as (desk, intake):
        intake.broken = lambda: StoreBusy("the lock was not free")
        answers = await asyncio.gather(*(desk.place(order(n)) for n in (1, 2, 3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreBusy] * 3
        intake.broken = None
        assert (await desk.place(order(1))).created
    assert rows(sqlite, "SELECT id FROM orders") == [("order-1",)]


async def test_those_that_come_while_a_transaction_waits_for_the_lock_go_along(sqlite: Database) -> None:
    async with desk_of(sqlite) as (desk, intake), asyncio.timeout(60):
        with sqlite.write():
            first = asyncio.create_task(desk.place(order(1)))
            assert sqlite._lock is not None
            await eventually(lambda: len(sqlite._lock._queue) == 2, 60, "its transaction waits")  # type: ignore[union-attr]
            others = [asyncio.create_task(desk.place(order(number))) for number in (2, 3)]
            await asyncio.sleep(0)
        assert all(placed.created for placed in await asyncio.gather(first, *others))
    assert intake.groups == [["order-1", "order-2", "order-3"]]


async def test_a_lock_that_cannot_be_had_is_told_to_all_who_wait(
    sqlite: Database, open_database: Callable[..., Database]
) -> None:
    hurried = open_database(str(sqlite.url), busy_timeout=0.1)
    async with desk_of(hurried, busy=60) as (desk, _), asyncio.timeout(50):
        with sqlite.write():
            answers = await asyncio.gather(*(desk.place(order(n)) for n in (1, 2, 3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreBusy] * 3
        assert (await desk.place(order(4))).created
    assert rows(sqlite, "SELECT id FROM orders") == [("order-4",)]

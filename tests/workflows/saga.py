"""The rebuild saga with a gate in its way: a test stops it before or after any of its transactions."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from activities.rebuilding import RebuildActivities
from pipeline.writer import Writer
from store.control import read_control
from store.engine import Database

T = TypeVar("T")

BEFORE, AFTER = "before", "after"
# Each transaction of the saga that writes, and the comparison's reads, in their order.
STEPS = (
    "begin_rebuild",
    "fix_history",
    "expect_chunk",
    "replay_chunk",
    "read_range",
    "seal",
    "store_certificate",
    "activate",
    "forget_expected",
)


class GatedWriter(Writer):
    """A Writer that runs `stop` once, before or after the transaction of the given name; `stop` may wait."""

    def __init__(self, database: Database, step: str = "", when: str = BEFORE) -> None:
        super().__init__(database)
        self._closed_at = (step, when)
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def timed_write(self, work: Callable[[Connection], T]) -> tuple[T, float]:  # `write` comes by here too
        result: tuple[T, float] = await self._pass(work, super().timed_write)
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        result: T = await self._pass(work, super().read)
        return result

    async def _pass(self, work: Callable[[Connection], T], run: Any) -> Any:
        name = getattr(work, "func", work).__name__
        await self._stand_at(name, BEFORE)
        result = await run(work)
        await self._stand_at(name, AFTER)
        return result

    async def _stand_at(self, name: str, when: str) -> None:
        if (name, when) != self._closed_at:
            return
        self.reached.set()
        try:
            await self.go.wait()
        finally:
            self._closed_at = ("", "")  # once


def activities_of(writer: Writer) -> list[Callable[..., Any]]:
    """What a worker runs for the saga."""
    own = RebuildActivities(writer)
    return [
        own.begin_rebuild,
        own.await_drained,
        own.replay,
        own.reconcile,
        own.seal,
        own.certify,
        own.activate,
        own.fail_rebuild,
        own.forget_expected,
    ]


class Watch:
    """Reads what readers read, all the time: one generation is active, and its totals are those of its rows."""

    def __init__(self, database: Database, every: float = 0.005) -> None:
        """`every`: seconds between two reads."""
        self._database = database
        self._every = every
        self._over = threading.Event()
        self.reads = 0
        self.broken: list[str] = []
        self.seen: list[str] = []  # active generations in their order
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(self._every):
            with self._database.read() as connection:
                named = read_control(connection).active_generation
                active = list(
                    connection.execute(sa.text("SELECT generation FROM generations WHERE state = 'ACTIVE'")).scalars()
                )
                totals = _pairs(connection, "SELECT currency, orders, amount FROM sales_totals", named)
                held = _pairs(
                    connection,
                    "SELECT currency, count(*), CAST(sum(amount) AS BIGINT) FROM sales_applied",
                    named,
                    "GROUP BY currency",
                )
            self.reads += 1
            if active != [named] or totals != held:
                self.broken.append(f"{named} named, {active} active, {totals} in totals, {held} in rows")
            if named not in self.seen[-1:]:
                self.seen.append(named)

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join(10)
        assert self.reads > 0
        assert self.broken == []


def _pairs(connection: Connection, select: str, generation: str, group: str = "") -> list[Any]:
    statement = f"{select} WHERE generation = :generation {group}"
    return sorted(map(tuple, connection.execute(sa.text(statement), {"generation": generation})))

"""The rebuild saga with a gate in its way: a test stops it before or after any transaction, and judges its end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from activities.rebuilding import RebuildActivities
from contracts.messages import RebuildInput
from pipeline.writer import Writer
from runs.starts import Runs
from store.audit import audit
from store.control import read_control, resume_intake
from store.engine import Database
from tests.store.rebuilding import generation, history, intake
from tests.store.scenes import scalar
from tests.waiting import eventually
from tests.workflows.workers import Attempts, workers

T = TypeVar("T")

BEFORE, AFTER = "before", "after"
# Each transaction of the saga that writes, and the comparison's reads, in their order.
STEPS = (
    "begin_rebuild",
    "fix_history",
    "expect_chunk",
    "set_phase replaying",
    "replay_chunk",
    "set_phase reconciling",
    "read_range",
    "seal",
    "store_certificate",
    "activate",
    "forget_expected",
)
# Where a test stops or kills it: at all of them but the two that only tell people the phase.
STOPS = tuple(step for step in STEPS if not step.startswith("set_phase"))
GATES = [(step, when) for step in STOPS for when in (BEFORE, AFTER)]


def step_of(work: Callable[..., Any]) -> str:
    """What a transaction is called here: its function of the store with the phase that it sets, or the activity that
    made it up."""
    if isinstance(work, partial):
        return " ".join([work.func.__name__, *(value for key, value in work.keywords.items() if key == "phase")])
    parts = work.__qualname__.split(".")
    return parts[parts.index("<locals>") - 1] if "<locals>" in parts else work.__name__


def switched_at(step: str, when: str) -> bool:
    """Whether the new generation is active at this gate."""
    return GATES.index((step, when)) >= GATES.index(("activate", AFTER))


class GatedWriter(Writer):
    """A Writer that stops once, before or after the transaction of the given name, until it is told to `go`."""

    def __init__(self, database: Database, step: str = "", when: str = BEFORE) -> None:
        super().__init__(database)
        self._closed_at = (step, when)
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self.passed: list[str] = []  # the names of what was committed, in their order

    # `write` comes by here too.
    async def timed_write(self, work: Callable[[Connection], T], *, patience: float = 0.0) -> tuple[T, float]:
        result: tuple[T, float] = await self._pass(work, partial(super().timed_write, patience=patience))
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        result: T = await self._pass(work, super().read)
        return result

    async def _pass(self, work: Callable[[Connection], T], run: Any) -> Any:
        name = step_of(work)
        await self._stand_at(name, BEFORE)
        result = await run(work)
        self.passed.append(name)
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


@dataclass
class Saga:
    """A started rebuild, and the gate in its way."""

    database: Database
    runs: Runs
    writer: GatedWriter
    handle: WorkflowHandle[Any, Any]
    attempts: Attempts

    async def at_the_gate(self) -> None:
        async with asyncio.timeout(60):
            await self.writer.reached.wait()

    async def outcome(self) -> Any:
        """The run's report, or what it failed with."""
        try:
            async with asyncio.timeout(120):
                return await self.handle.result()
        except WorkflowFailureError as error:
            return error.cause

    async def details(self) -> str:
        metadata: Any = await self.handle.query("__temporal_workflow_metadata")
        return str(metadata.current_details)


@asynccontextmanager
async def saga(
    client: Client,
    database: Database,
    step: str = "",
    when: str = BEFORE,
    *,
    writer: GatedWriter | None = None,
    **changes: Any,
) -> AsyncIterator[Saga]:
    """A rebuild that has been started, and a worker for it; `changes`: fields of its input."""
    runs = Runs(client, [])
    handle = await runs.start_rebuild(RebuildInput(**changes))
    async with carried_on(database, runs, handle, writer or GatedWriter(database, step, when)) as run:
        yield run


@asynccontextmanager
async def carried_on(
    database: Database, runs: Runs, handle: WorkflowHandle[Any, Any], writer: GatedWriter
) -> AsyncIterator[Saga]:
    """A worker for a rebuild that has been started."""
    attempts = Attempts()
    async with workers(runs.client, activities_of(writer), interceptors=[attempts]):
        try:
            yield Saga(database, runs, writer, handle, attempts)
        finally:
            writer.go.set()
            # What was at the gate finds that all is over. Not during the worker's end: its answer might be stranded.
            await eventually(lambda: attempts.running == 0, 60, "no activity is under way")
    writer.close()


def stands(database: Database, rebuild_id: str, active: str) -> None:
    """After its end: intake is paused by it, that generation is active, no other is half done, the audit is clean."""
    assert intake(database) == ("PAUSED", rebuild_id, active)
    assert scalar(database, "SELECT count(*) FROM generations WHERE state IN ('BUILDING', 'SEALED')") == 0
    with database.read() as connection:
        assert audit(connection).breaks == []


async def goes_on(client: Client, database: Database) -> None:
    """Intake can be resumed, takes the next order, and a further rebuild gets the totals of all orders right."""
    orders = int(scalar(database, "SELECT count(*) FROM orders"))
    with database.write() as connection:
        assert resume_intake(connection)
    assert intake(database)[:2] == ("OPEN", None)
    history(database, [orders + 1])
    async with saga(client, database) as again:
        report = await again.outcome()
    assert (report["state"], report["expected"], report["replayed"]) == ("COMPLETED", orders + 1, orders + 1), report
    stands(database, report["rebuild_id"], report["generation"])
    made = generation(database, report["generation"])
    assert made is not None
    total = scalar(database, "SELECT sum(amount) FROM orders")
    assert [sum(column) for column in zip(*made.totals.values(), strict=True)] == [orders + 1, total]
    assert scalar(database, "SELECT count(*) FROM rebuild_expected") == 0


class Watch:
    """Reads what readers read, all the time: one generation is active, and its totals are those of its rows."""

    def __init__(self, database: Database, every: float = 0.02) -> None:
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

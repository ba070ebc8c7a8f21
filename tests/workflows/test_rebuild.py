"""The rebuild's run on a real server: it ends in one way of few, whenever it is cancelled, and says which."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError, WorkflowAlreadyStartedError

from contracts.messages import RebuildInput
from contracts.names import REBUILD_ID
from pipeline import look as looking
from pipeline.event_list import EventList, connect
from pipeline.hub import Hub
from pipeline.look import Look
from runs.starts import Runs
from store.engine import Database
from tests.store.rebuilding import begin, everything, execute, fail, generation, history, intake, rebuild, state
from tests.store.scenes import order, place, publish, scalar, spread
from tests.waiting import eventually
from tests.workflows.saga import AFTER, BEFORE, GatedWriter, Watch, activities_of
from tests.workflows.workers import workers

pytestmark = pytest.mark.anyio

QUICK: dict[str, Any] = {"drain_bound": 60.0, "phase_bound": 60.0, "heartbeat_timeout": 5.0}


@dataclass
class Saga:
    """A started rebuild, and the gate in its way."""

    database: Database
    runs: Runs
    writer: GatedWriter
    handle: WorkflowHandle[Any, Any]

    async def at_the_gate(self) -> None:
        async with asyncio.timeout(30):
            await self.writer.reached.wait()

    async def outcome(self) -> Any:
        """The run's report, or what it failed with."""
        try:
            async with asyncio.timeout(40):
                return await self.handle.result()
        except WorkflowFailureError as error:
            return error.cause

    async def details(self) -> str:
        description = await self.handle.describe()
        metadata: Any = await self.handle.query("__temporal_workflow_metadata")
        assert description is not None
        return str(metadata.current_details)


@asynccontextmanager
async def saga(
    client: Client, database: Database, step: str = "", when: str = BEFORE, **changes: Any
) -> AsyncIterator[Saga]:
    writer = GatedWriter(database, step, when)
    runs = Runs(client, [])
    async with workers(client, activities_of(writer)):
        try:
            yield Saga(database, runs, writer, await runs.start_rebuild(RebuildInput(**QUICK | changes)))
        finally:
            writer.go.set()
    writer.close()


async def rebuilds_again(client: Client, database: Database) -> None:
    """A further rebuild goes through."""
    async with saga(client, database) as again:
        report = await again.outcome()
    assert report["state"] == "COMPLETED", report
    assert intake(database)[2] == report["generation"]
    assert scalar(database, "SELECT count(*) FROM rebuild_expected") == 0


async def test_a_rebuild_switches_and_tells_its_phases(client: Client, database: Database) -> None:
    history(database, [1, 2, order(3, currency="EUR")])
    before = everything(database)
    with Watch(database).watching() as watch:
        async with saga(client, database) as run:
            report = await run.outcome()
            details = await run.details()
    assert (report["state"], report["generation"], report["expected"], report["replayed"]) == (
        "COMPLETED",
        "generation-1",
        3,
        3,
    )
    assert intake(database) == ("PAUSED", "rebuild-1", "generation-1")
    assert generation(database, "generation-1").totals == {"EUR": (1, 300), "JPY": (2, 300)}  # type: ignore[union-attr]
    assert everything(database) == before
    assert set(watch.seen) <= {"initial", "generation-1"}
    for words in (
        "rebuild: pausing intake",
        "rebuild-1: initial -> generation-1, intake paused",
        "drained; 3 orders expected; replaying",
        "3 events equal by id and amount; sealing",
        "certified: 3 events",
        "generation-1 is active; initial is retired",
    ):
        assert words in details
    await rebuilds_again(client, database)


# Where the cancel arrives, and whether the switch is made all the same.
CANCELS = [
    ("begin_rebuild", BEFORE, False),
    ("begin_rebuild", AFTER, False),
    ("fix_history", BEFORE, False),
    ("fix_history", AFTER, False),
    ("expect_chunk", AFTER, False),
    ("replay_chunk", BEFORE, False),
    ("replay_chunk", AFTER, False),
    ("read_range", BEFORE, False),
    ("seal", BEFORE, False),
    ("seal", AFTER, False),
    ("store_certificate", AFTER, False),
    ("activate", BEFORE, False),
    ("activate", AFTER, True),
    ("forget_expected", BEFORE, True),
]


@pytest.mark.parametrize(("step", "when", "switched"), CANCELS, ids=[f"{when} {step}" for step, when, _ in CANCELS])
async def test_a_cancel_at_any_step_ends_as_the_database_says(
    client: Client, sqlite: Database, step: str, when: str, switched: bool
) -> None:
    history(sqlite, range(1, 6))
    old = generation(sqlite, "initial")
    with Watch(sqlite).watching():
        async with saga(client, sqlite, step, when) as run:
            await run.at_the_gate()
            await run.handle.cancel()
            if step == "begin_rebuild":
                # Only the transaction's answer says what there is to end: the run waits for it.
                run.writer.go.set()
            outcome = await run.outcome()
        # What was at the gate has been let go by now, and found that all is over.
    done = rebuild(sqlite, "rebuild-1")
    if switched:
        assert outcome["state"] == done.state == "COMPLETED"
        assert intake(sqlite) == ("PAUSED", "rebuild-1", "generation-1")
    else:
        assert isinstance(outcome, CancelledError)
        assert (done.state, done.error) == ("FAILED", "it was cancelled")
        assert intake(sqlite) == ("PAUSED", "rebuild-1", "initial")
        assert generation(sqlite, "initial") == old
        assert state(sqlite, "generation-1") in (None, "FAILED")
        assert scalar(sqlite, "SELECT count(*) FROM generations WHERE state IN ('BUILDING', 'SEALED')") == 0
    await rebuilds_again(client, sqlite)


@pytest.mark.parametrize(("step", "when"), [("fix_history", BEFORE), ("activate", BEFORE), ("activate", AFTER)])
async def test_a_cancel_on_postgresql(client: Client, postgres: Database, step: str, when: str) -> None:
    history(postgres, range(1, 6))
    async with saga(client, postgres, step, when) as run:
        await run.at_the_gate()
        await run.handle.cancel()
        outcome = await run.outcome()
    if when == AFTER:
        assert outcome["state"] == "COMPLETED"
    else:
        assert isinstance(outcome, CancelledError)
        assert (rebuild(postgres, "rebuild-1").state, intake(postgres)[2]) == ("FAILED", "initial")
        assert state(postgres, "generation-1") in (None, "FAILED")
    await rebuilds_again(client, postgres)


async def test_a_cancel_while_a_failure_is_being_written_leaves_the_failure_readable(
    client: Client, sqlite: Database
) -> None:
    history(sqlite, [1, 2, 3])
    execute(sqlite, "DELETE FROM orders WHERE id = 'order-2'")
    async with saga(client, sqlite, "fail_rebuild", BEFORE) as run:
        await run.at_the_gate()
        await run.handle.cancel()
        # The run has heard of it: the request is in its history, and the next step of the run is done.
        await eventually(lambda: _cancel_is_seen(run), 20, "the cancel reaches the run")
        run.writer.go.set()
        outcome = await run.outcome()
    done = rebuild(sqlite, "rebuild-1")
    assert done.state == "FAILED"
    assert "unexpected: order-2:placed" in (done.error or "")
    assert isinstance(outcome, ApplicationError)
    assert "unexpected: order-2:placed" in str(outcome)


async def _cancel_is_seen(run: Saga) -> bool:
    from temporalio.api.enums.v1 import EventType

    events = (await run.handle.fetch_history()).events
    asked = [
        each.event_id for each in events if each.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
    ]
    tasks = [each.event_id for each in events if each.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED]
    return bool(asked and tasks and tasks[-1] > asked[-1])


DOCTORED = {
    "missing": (
        "DELETE FROM sales_applied WHERE generation = 'generation-1' AND position = 2",
        "missing: order-2:placed",
    ),
    "other amount": (
        "UPDATE sales_applied SET amount = 7 WHERE generation = 'generation-1' AND position = 2",
        "different: order-2:placed (expected 200 JPY, found 7 JPY)",
    ),
    "totals": (
        "UPDATE sales_totals SET orders = 9 WHERE generation = 'generation-1'",
        "totals: JPY expected 3 orders, 600; rows hold 3, 600; totals say 9, 600",
    ),
}


@pytest.mark.parametrize("when", ["replay", "seal"])
@pytest.mark.parametrize("kind", DOCTORED)
async def test_a_mismatch_ends_it_and_names_the_differences(
    client: Client, sqlite: Database, kind: str, when: str
) -> None:
    statement, words = DOCTORED[kind]
    history(sqlite, [1, 2, 3])
    gate = ("replay_chunk", AFTER) if when == "replay" else ("seal", AFTER)
    async with saga(client, sqlite, *gate) as run:
        await run.at_the_gate()
        execute(sqlite, statement)
        run.writer.go.set()
        outcome = await run.outcome()
        details = await run.details()
    assert isinstance(outcome, ApplicationError)
    assert outcome.type == "RebuildFailed"
    for text in (str(outcome), rebuild(sqlite, "rebuild-1").error or "", details):
        assert f"the generation differs from the orders: {words}" in text
    assert "initial stays active and intake stays paused" in str(outcome)
    assert intake(sqlite) == ("PAUSED", "rebuild-1", "initial")
    assert state(sqlite, "generation-1") == "FAILED"
    await rebuilds_again(client, sqlite)


async def test_a_drain_that_outlasts_its_bound_names_what_is_stuck(client: Client, sqlite: Database) -> None:
    history(sqlite, [1])
    place(sqlite, 2, 3)
    stuck = publish(sqlite)
    async with saga(client, sqlite, drain_bound=0.3) as run:
        outcome = await run.outcome()
    assert "the outbox was not drained within 0.3 s; waiting: order-2:placed, order-3:placed" in str(outcome)
    assert (rebuild(sqlite, "rebuild-1").state, intake(sqlite)) == ("FAILED", ("PAUSED", "rebuild-1", "initial"))
    spread(sqlite, *stuck)
    await rebuilds_again(client, sqlite)


async def test_it_goes_on_as_soon_as_the_history_is_drained(client: Client, sqlite: Database) -> None:
    history(sqlite, [1])
    place(sqlite, 2)
    async with saga(client, sqlite, "fix_history", AFTER) as run:
        await run.at_the_gate()
        spread(sqlite, *publish(sqlite))
        run.writer.go.set()
        report = await run.outcome()
    assert (report["state"], report["expected"]) == ("COMPLETED", 2)


@pytest.mark.parametrize("step", ["fix_history", "replay_chunk", "read_range"])
async def test_a_phase_that_outlasts_its_bound_ends_it(client: Client, sqlite: Database, step: str) -> None:
    history(sqlite, [1])
    async with saga(client, sqlite, step, BEFORE, drain_bound=0.5, phase_bound=0.5) as run:
        await run.at_the_gate()
        outcome = await run.outcome()
    assert "a phase did not end within its bound" in str(outcome)
    assert rebuild(sqlite, "rebuild-1").state == "FAILED"
    await rebuilds_again(client, sqlite)


async def test_a_second_rebuild_is_refused_while_one_runs(client: Client, sqlite: Database) -> None:
    history(sqlite, [1])
    async with saga(client, sqlite, "replay_chunk", BEFORE) as run:
        await run.at_the_gate()
        with pytest.raises(WorkflowAlreadyStartedError):
            await run.runs.start_rebuild(RebuildInput(**QUICK))
        run.writer.go.set()
        assert (await run.outcome())["state"] == "COMPLETED"
    assert scalar(sqlite, "SELECT count(*) FROM rebuilds") == 1


async def test_a_rebuild_that_the_database_refuses_fails_with_the_reason_and_changes_nothing(
    client: Client, sqlite: Database
) -> None:
    history(sqlite, [1])
    begin(sqlite, "a run of another server")
    async with saga(client, sqlite) as run:
        outcome = await run.outcome()
    assert str(outcome) == "Refused: rebuild-1 runs already; wait for it, or cancel it"
    assert (rebuild(sqlite, "rebuild-1").state, intake(sqlite)[1]) == ("RUNNING", "rebuild-1")
    fail(sqlite, "rebuild-1")
    await rebuilds_again(client, sqlite)


async def test_a_rollback_goes_the_same_way(client: Client, sqlite: Database) -> None:
    history(sqlite, [1, 2])
    async with saga(client, sqlite, resume=True) as run:
        assert (await run.outcome())["state"] == "COMPLETED"
    history(sqlite, [3])
    async with saga(client, sqlite, kind="rollback") as run:
        report = await run.outcome()
    assert (report["generation"], report["replayed"]) == ("initial", 1)
    assert intake(sqlite) == ("PAUSED", "rollback-2", "initial")
    assert generation(sqlite, "initial").totals == {"JPY": (3, 600)}  # type: ignore[union-attr]
    async with saga(client, sqlite, kind="rollback", target="nowhere") as run:
        outcome = await run.outcome()
    assert "there is no generation nowhere" in str(outcome)


async def test_the_look_ends_a_rebuild_whose_run_was_terminated(
    client: Client, sqlite: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_REBUILD_GRACE_MS", 0)
    history(sqlite, range(1, 4))
    async with saga(client, sqlite, "replay_chunk", AFTER) as run:
        await run.at_the_gate()
        events = EventList(connect(redis_url))
        look = Look(run.writer, events, Hub(), run.runs, [], lost_after=30, run_grace=12)
        await look.once()
        assert rebuild(sqlite, "rebuild-1").state == "RUNNING"
        await run.handle.terminate("somebody did")
        await look.once()
        done = rebuild(sqlite, "rebuild-1")
        assert (done.state, done.error) == ("FAILED", "its run is gone")
        assert (state(sqlite, "generation-1"), intake(sqlite)[2]) == ("FAILED", "initial")
        run.writer.go.set()
        events.close()
    await rebuilds_again(client, sqlite)
    assert run.handle.id == REBUILD_ID

"""A cancel of the rebuild's run, as the Web UI sends it, at every step: the database says how it ends."""

from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, CancelledError

from store.engine import Database
from store.rebuild import PHASES
from tests.store.rebuilding import execute, generation, history, rebuild, state
from tests.store.scenes import scalar
from tests.waiting import eventually
from tests.workflows.saga import (
    AFTER,
    BEFORE,
    GATES,
    STEPS,
    GatedWriter,
    Saga,
    Watch,
    goes_on,
    saga,
    stands,
    switched_at,
)

pytestmark = pytest.mark.anyio


async def test_the_gates_stand_around_every_transaction_and_in_every_phase(
    client: Client, sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(sqlite, range(1, 6))
    phases: list[str] = []
    stand_at = GatedWriter._stand_at

    async def noting(self: GatedWriter, name: str, when: str) -> None:
        if when == AFTER and name in STEPS:
            phases.append(str(scalar(sqlite, "SELECT phase FROM rebuilds")))
        await stand_at(self, name, when)

    monkeypatch.setattr(GatedWriter, "_stand_at", noting)
    async with saga(client, sqlite) as run:
        await run.outcome()
    reads = {"read_range", "get_rebuild", "check_sums", "leftover_expected"}
    written = [name for name in run.writer.passed if name not in reads - set(STEPS)]
    assert tuple(dict.fromkeys(written)) == STEPS
    assert tuple(dict.fromkeys(phases)) == PHASES


@pytest.mark.parametrize(("step", "when"), GATES, ids=[f"{when} {step}" for step, when in GATES])
async def test_a_cancel_at_any_step_ends_as_the_database_says(
    client: Client, database: Database, step: str, when: str
) -> None:
    history(database, range(1, 6))
    old = generation(database, "initial")
    with Watch(database).watching() as watch:
        async with saga(client, database, step, when) as run:
            await run.at_the_gate()
            await run.handle.cancel()
            if step == "begin_rebuild":
                # Only the transaction's answer says what there is to end: the run waits for it.
                run.writer.go.set()
            outcome = await run.outcome()
    # What was at the gate has been let go by now, and found that all is over.
    done = rebuild(database, "rebuild-1")
    if switched_at(step, when):
        assert outcome["state"] == done.state == "COMPLETED"
        stands(database, "rebuild-1", "generation-1")
    else:
        assert isinstance(outcome, CancelledError)
        assert (done.state, done.error) == ("FAILED", "it was cancelled")
        assert generation(database, "initial") == old
        assert state(database, "generation-1") in (None, "FAILED")
        assert watch.seen == ["initial"]
        stands(database, "rebuild-1", "initial")
    await goes_on(client, database)


async def test_a_cancel_while_a_failure_is_being_written_leaves_the_failure_readable(
    client: Client, sqlite: Database
) -> None:
    history(sqlite, [1, 2, 3])
    execute(sqlite, "DELETE FROM orders WHERE id = 'order-2'")
    async with saga(client, sqlite, "fail_rebuild", BEFORE) as run:
        await run.at_the_gate()
        await run.handle.cancel()
        # The run has heard of it: the request is in its history, and the next step of the run is done.
        await eventually(lambda: _cancel_is_seen(run), 60, "the cancel reaches the run")
        run.writer.go.set()
        outcome: Any = await run.outcome()
    done = rebuild(sqlite, "rebuild-1")
    assert done.state == "FAILED"
    assert "unexpected: order-2:placed" in (done.error or "")
    assert isinstance(outcome, ApplicationError)
    assert "unexpected: order-2:placed" in str(outcome)


async def _cancel_is_seen(run: Saga) -> bool:
    events = (await run.handle.fetch_history()).events
    asked = [
        each.event_id for each in events if each.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
    ]
    tasks = [each.event_id for each in events if each.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED]
    return bool(asked and tasks and tasks[-1] > asked[-1])

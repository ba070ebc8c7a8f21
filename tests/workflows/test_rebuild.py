"""The rebuild's run on a real server: it ends in one way of few, and says which."""

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from contracts.messages import RebuildInput
from contracts.names import REBUILD_ID
from pipeline import look as looking
from pipeline.event_list import EventList, connect
from pipeline.hub import Hub
from pipeline.look import Look
from store.engine import Database
from tests.store.rebuilding import begin, everything, execute, fail, generation, history, intake, rebuild, state
from tests.store.scenes import order, place, publish, scalar, spread
from tests.workflows.saga import AFTER, BEFORE, Watch, saga

pytestmark = pytest.mark.anyio


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


async def test_it_goes_on_as_soon_as_the_history_is_drained(client: Client, sqlite: Database) -> None:
    history(sqlite, [1])
    place(sqlite, 2)
    async with saga(client, sqlite, "fix_history", AFTER) as run:
        await run.at_the_gate()
        spread(sqlite, *publish(sqlite))
        run.writer.go.set()
        report = await run.outcome()
    assert (report["state"], report["expected"]) == ("COMPLETED", 2)


async def test_a_second_rebuild_is_refused_while_one_runs(client: Client, sqlite: Database) -> None:
    history(sqlite, [1])
    async with saga(client, sqlite, "replay_chunk", BEFORE) as run:
        await run.at_the_gate()
        with pytest.raises(WorkflowAlreadyStartedError):
            await run.runs.start_rebuild(RebuildInput())
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

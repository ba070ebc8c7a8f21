"""The rebuild's bounds as they are by default, minutes and hours, on a server that skips the time in between."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import TimeSkipper

from contracts.messages import RebuildInput
from runs.starts import Runs
from store.engine import Database
from tests.store.rebuilding import history, intake, rebuild
from tests.store.scenes import place, publish, spread
from tests.waiting import eventually
from tests.workflows.saga import GatedWriter, Saga, T, carried_on, goes_on, saga, stands, step_of

pytestmark = pytest.mark.anyio

DRAIN_BOUND = timedelta(seconds=RebuildInput().drain_bound)
PHASE_BOUND = timedelta(seconds=RebuildInput().phase_bound)
SOON = timedelta(seconds=120)  # what the steps themselves may really take meanwhile


class Away(GatedWriter):
    """A database that does not answer: for so long, by the server's clock, each transaction of these fails."""

    def __init__(self, database: Database, **hours: float) -> None:
        super().__init__(database)
        self._for = {step: timedelta(hours=each) for step, each in hours.items()}

    async def _pass(self, work: Callable[[Connection], T], run: Any) -> Any:
        info = activity.info()
        away = self._for.get(step_of(work), timedelta(0))
        if info.current_attempt_scheduled_time - info.scheduled_time < away:
            raise OperationalError("COMMIT", {}, Exception("the disk is not there"))
        return await super()._pass(work, run)


async def took(skipper: TimeSkipper, run: Saga) -> timedelta:
    """How long the run was under way, by its own clock."""
    return await skipper.get_current_time(run.handle) - (await run.handle.describe()).start_time


async def test_a_drain_may_take_ten_minutes_whatever_becomes_of_workers_and_then_names_what_is_stuck(
    skipper: TimeSkipper, client: Client, database: Database
) -> None:
    history(database, [1])
    place(database, 2, 3)
    stuck = publish(database)
    runs = Runs(skipper.client, [])
    with skipper.with_time_skipping_disabled():
        handle = await runs.start_rebuild(RebuildInput())
    async with carried_on(database, runs, handle, GatedWriter(database)) as run:
        await eventually(lambda: run.attempts.of("await_drained"), 60, "it waits")
        assert await skipper.fast_forward(handle, DRAIN_BOUND / 2)
        said = (await handle.describe()).raw_description.pending_activities[0].last_failure.message
        assert said == "the outbox is not drained; waiting: order-2:placed, order-3:placed"
    async with carried_on(database, runs, handle, GatedWriter(database)) as run:
        await skipper.fast_forward(handle)
        outcome = await run.outcome()
        assert DRAIN_BOUND <= await took(skipper, run) < DRAIN_BOUND + SOON
        # The last question is asked as the bound runs out; before it, not too many.
        assert len(run.attempts.of("await_drained")) < 100
    assert isinstance(outcome, ApplicationError)
    words = "the outbox was not drained within 600 s; waiting: order-2:placed, order-3:placed"
    assert (rebuild(database, "rebuild-1").state, rebuild(database, "rebuild-1").error) == ("FAILED", words)
    assert words in str(outcome)
    stands(database, "rebuild-1", "initial")
    spread(database, *stuck)
    await goes_on(client, database)


async def test_a_drain_that_ends_after_minutes_is_noticed_within_seconds(
    skipper: TimeSkipper, sqlite: Database
) -> None:
    history(sqlite, [1])
    place(sqlite, 2)
    stuck = publish(sqlite)
    runs = Runs(skipper.client, [])
    with skipper.with_time_skipping_disabled():
        handle = await runs.start_rebuild(RebuildInput())
    async with carried_on(sqlite, runs, handle, GatedWriter(sqlite)) as run:
        await eventually(lambda: run.attempts.of("await_drained"), 60, "it waits")
        assert await skipper.fast_forward(handle, DRAIN_BOUND / 4)
        before = await skipper.get_current_time(handle)
        spread(sqlite, *stuck)
        await skipper.fast_forward(handle)
        report = await run.outcome()
        last = run.attempts.of("await_drained")[-1]
    assert (report["state"], report["expected"]) == ("COMPLETED", 2)
    assert last - before < timedelta(seconds=30)
    stands(sqlite, "rebuild-1", "generation-1")


@pytest.mark.parametrize(
    ("database_url", "step"),
    [("sqlite", "replay_chunk"), ("postgresql", "store_certificate")],
    indirect=["database_url"],
)
async def test_a_phase_may_take_an_hour_and_then_ends_it_once_the_database_is_back(
    skipper: TimeSkipper, client: Client, database: Database, step: str
) -> None:
    history(database, [1, 2])
    away = Away(database, **{step: 2, "fail_rebuild": 0.1})
    async with saga(skipper.client, database, writer=away) as run:
        outcome = await run.outcome()
        lasted = await took(skipper, run)
    # Attempts are up to half a minute apart: the last one that would come too late is not made.
    expected = PHASE_BOUND + timedelta(hours=0.1)
    assert expected - timedelta(seconds=30) <= lasted < expected + timedelta(seconds=30) + SOON
    done = rebuild(database, "rebuild-1")
    assert done.state == "FAILED"
    assert (done.error or "").startswith("a phase did not end within its bound; it failed last with ")
    assert "the disk is not there" in (done.error or "")
    assert "a phase did not end within its bound" in str(outcome)
    stands(database, "rebuild-1", "initial")
    await goes_on(client, database)


@pytest.mark.parametrize("step", ["begin_rebuild", "activate"])
async def test_a_step_of_one_transaction_waits_as_long_as_the_database_is_away(
    skipper: TimeSkipper, sqlite: Database, step: str
) -> None:
    history(sqlite, [1, 2])
    async with saga(skipper.client, sqlite, writer=Away(sqlite, **{step: 0.25})) as run:
        report = await run.outcome()
        assert run.attempts.keep(step, [min(0.2 * 2**n, 30) for n in range(20)]), run.attempts.pauses(step)
        assert timedelta(hours=0.25) <= await took(skipper, run) < timedelta(hours=0.25, minutes=5)
    assert report["state"] == "COMPLETED"
    stands(sqlite, "rebuild-1", "generation-1")


async def test_one_that_is_held_for_a_drill_is_given_up_after_an_hour(
    skipper: TimeSkipper, client: Client, sqlite: Database
) -> None:
    history(sqlite, [1])
    async with saga(skipper.client, sqlite, hold=True) as run:
        outcome = await run.outcome()
        assert PHASE_BOUND <= await took(skipper, run) < PHASE_BOUND + SOON
    assert "nobody told it to proceed within its bound" in str(outcome)
    assert intake(sqlite)[0] == "PAUSED"
    stands(sqlite, "rebuild-1", "initial")
    await goes_on(client, sqlite)


async def test_a_cancel_ends_the_wait_for_a_drain_at_once(
    skipper: TimeSkipper, client: Client, sqlite: Database
) -> None:
    history(sqlite, [1])
    place(sqlite, 2)
    stuck = publish(sqlite)
    runs = Runs(skipper.client, [])
    with skipper.with_time_skipping_disabled():
        handle = await runs.start_rebuild(RebuildInput())
    async with carried_on(sqlite, runs, handle, GatedWriter(sqlite)) as run:
        await eventually(lambda: run.attempts.of("await_drained"), 60, "it waits")
        assert await skipper.fast_forward(handle, DRAIN_BOUND / 10)
        before = await skipper.get_current_time(handle)
        await handle.cancel()
        await run.outcome()
        assert await skipper.get_current_time(handle) - before < SOON
    assert rebuild(sqlite, "rebuild-1").error == "it was cancelled"
    stands(sqlite, "rebuild-1", "initial")
    spread(sqlite, *stuck)
    await goes_on(client, sqlite)

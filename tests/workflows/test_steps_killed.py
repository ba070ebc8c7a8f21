"""A worker that dies inside a single step is missed within seconds, and the step is done once; one that only waits is
not missed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

import workflows.delivery
from contracts.messages import DeliveryInput, FulfilmentInput
from contracts.names import TASK_QUEUE
from embedded import TemporalServer
from pipeline.writer import Writer
from runs.starts import Runs
from store.dead_letters import DeadFilter
from store.deliveries import record_failure
from store.engine import Database
from store.jobs import begin_job
from store.redrives import freeze_redrive
from tests.servers import fresh_namespace
from tests.store.rebuilding import history
from tests.store.scenes import rows, scalar
from tests.store.test_redrives import seed
from tests.workflows.killing import Scene, carry_on, kill_workers
from tests.workflows.saga import AFTER, BEFORE
from tests.workflows.victim import AT_ONCE, every_activity
from tests.workflows.workers import events_of, workers
from worker import WORKFLOWS, sandbox
from workflows.policies import ALIVE

pytestmark = pytest.mark.anyio

LATER = 1 << 60  # no look comes in this test
MESSAGE = DeliveryInput("sales", "order-1:placed", "order/order-1")


def job(database: Database, **changes: Any) -> FulfilmentInput:
    with database.write() as connection:
        begin_job(connection, "job-1", 100, 1, LATER)
    return FulfilmentInput("job-1", 100, **changes)


def failed_once(database: Database) -> DeliveryInput:
    """An event that failed at `sales`, and is due."""
    history(database, [1], taken=False)
    with database.write() as connection:
        record_failure(connection, "sales", 1, attempts=1, error="first", next_attempt_at=1, now=1)
    return MESSAGE


async def start(runs: Runs, database: Database, step: str) -> Any:
    """The run in which the step is one."""
    if step == "_attempt":
        return await runs.start_delivery(failed_once(database))
    if step == "_take":
        seed(database, 5)
        with database.write() as connection:
            freeze_redrive(connection, "r", DeadFilter(), 1, LATER)
        return await runs.start_redrive("r", "one")
    if step == "end_job":
        return await runs.start_job(job(database, ship_fails=True, ship_attempts=1))
    return await runs.start_job(job(database))


def judge(scene: Scene, result: Any) -> None:
    """Its effects are there once, whichever worker had them."""
    database = scene.database
    if scene.step == "_attempt":
        assert (result["state"], result["attempts"]) == ("done", 1)
        assert rows(database, "SELECT orders, amount FROM sales_totals") == [(1, 100)]
        assert scalar(database, "SELECT count(*) FROM sales_applied") == 1
    elif scene.step == "_take":
        assert result == {"state": "COMPLETED", "total": 5, "taken": 5, "skipped": 0}
        assert scalar(database, "SELECT count(*) FROM deliveries WHERE status = 'pending' AND attempts = 0") == 5
    elif scene.step == "end_job":
        assert isinstance(result, WorkflowFailureError)
        assert rows(database, "SELECT state, error IS NULL FROM jobs") == [("FAILED", 0)]
        assert rows(database, "SELECT step FROM job_steps") == [("charge",)]
    else:
        assert result["ship"] == "completed"
        assert rows(database, "SELECT state FROM jobs") == [("COMPLETED",)]
        for table in ("charges", "shipments"):
            assert scalar(database, f"SELECT count(*) FROM {table}") == 1, table


STEPS = (*AT_ONCE, "_record_charge", "_record_shipment", "end_job", "_attempt", "_take")


async def test_a_step_whose_worker_is_killed_is_done_once_by_the_next_one_within_seconds(
    temporal_server: TemporalServer,
    sqlite_template: Path,
    tmp_path: Path,
    open_database: Callable[..., Database],
) -> None:
    scenes = []
    for step in STEPS:
        for when in (BEFORE, AFTER):
            path = tmp_path / f"{step}-{when}.db"
            path.write_bytes(sqlite_template.read_bytes())
            database = open_database(f"sqlite:///{path}")
            client = await fresh_namespace(temporal_server)
            scenes.append(Scene(step, when, client, database, await start(Runs(client, []), database, step)))
    await kill_workers(temporal_server, scenes)
    for scene, result in zip(scenes, await carry_on(scenes), strict=True):
        try:
            judge(scene, result)
        except Exception as error:
            raise AssertionError(f"killed {scene.when} {scene.step}: {result!r}") from error


@asynccontextmanager
async def silent_worker(client: Client, activities: list[Callable[..., Any]]) -> AsyncIterator[None]:
    """A worker whose activities do not beat."""
    async with Worker(
        client, task_queue=TASK_QUEUE, workflows=WORKFLOWS, activities=activities, workflow_runner=sandbox()
    ):
        yield


@pytest.mark.parametrize(("kind", "attempts"), [(workers, 1), (silent_worker, 2)], ids=["beats", "is silent"])
async def test_an_activity_that_waits_for_the_lock_is_not_taken_for_dead_as_its_worker_beats(
    client: Client, sqlite: Database, monkeypatch: pytest.MonkeyPatch, kind: Any, attempts: int
) -> None:
    monkeypatch.setattr(workflows.delivery, "ALIVE", ALIVE * 0.4)
    message = failed_once(sqlite)
    writer = Writer(sqlite)

    async def missed() -> bool:
        description = await handle.describe()
        pending = description.raw_description.pending_activities
        return bool(pending) and pending[0].attempt > 1

    async with kind(client, every_activity(writer)):
        with sqlite.write():
            handle = await Runs(client, []).start_delivery(message)
            deadline = asyncio.get_running_loop().time() + ALIVE.total_seconds() * 0.8
            while asyncio.get_running_loop().time() < deadline and not await missed():
                await asyncio.sleep(0.1)
        assert (await handle.result())["state"] == "done"
        [started] = await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED)
        assert started.activity_task_started_event_attributes.attempt == attempts
    writer.close()
    assert rows(sqlite, "SELECT orders, amount FROM sales_totals") == [(1, 100)]

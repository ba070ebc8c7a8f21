"""The run of a redrive: complete, gone on with after a kill, cancelled between chunks, found again when it was lost."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError
from temporalio.testing import ActivityEnvironment

from activities.redriving import RedriveActivities
from config import Settings
from contracts.events import Event
from contracts.messages import RedriveInput, RedriveReport
from contracts.names import redrive_id
from embedded import TemporalServer
from pipeline.writer import Writer
from receivers.base import Receiver
from runs.starts import Runs
from store.clock import now_ms
from store.dead_letters import DeadFilter
from store.engine import Database
from store.redrives import Redrive, freeze_redrive, get_redrive
from store.schema import deliveries
from tests.store.processes import Script
from tests.store.scenes import TYPE, append, register, rows, scalar
from tests.store.test_dead_letters import kill
from tests.store.test_redrives import seed
from tests.workflows.workers import workers
from worker import SaiseiWorker

pytestmark = pytest.mark.anyio

LATER = 10**9  # the look does not find it within this test


@dataclass
class Scene:
    """A database with dead letters, the activities, and whom they woke; `gate` holds a chunk after its commit."""

    database: Database
    writer: Writer
    woken: list[list[str]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)

    def activities(self, chunk: int) -> list[Callable[..., Any]]:
        redriving = RedriveActivities(self.writer, self._wake, chunk=chunk)
        return [redriving.redrive_chunk, redriving.cancel_redrive]

    def freeze(self, request: str, filters: DeadFilter | None = None, look_in: int = LATER) -> Redrive:
        with self.database.write() as connection:
            return freeze_redrive(connection, request, filters or DeadFilter(), now_ms(), now_ms() + look_in)[0]

    def state(self, request: str) -> tuple[str, int, int]:
        redrive = self.redrive(request)
        return redrive.state, redrive.taken, redrive.skipped

    def redrive(self, request: str) -> Redrive:
        with self.database.read() as connection:
            return get_redrive(connection, request)

    async def _wake(self, receivers: Sequence[str]) -> None:
        self.woken.append(list(receivers))
        if self.gate is not None:
            self.held.set()
            await self.gate.wait()


@pytest.fixture
def scene(sqlite: Database) -> Iterator[Scene]:
    writer = Writer(sqlite)
    yield Scene(sqlite, writer)
    writer.close()


def _runs(client: Client) -> Runs:
    return Runs(client, ())


async def _until(predicate: Callable[[], Any], description: str, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {description}"
        await asyncio.sleep(0.02)


async def _told_of_its_cancel(handle: WorkflowHandle[Any, Any]) -> None:
    """Until the run has answered its cancel request with a decision."""
    deadline = time.monotonic() + 60
    while True:
        kinds = [event.event_type for event in (await handle.fetch_history()).events]
        asked = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
        if asked in kinds and EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED in kinds[kinds.index(asked) :]:
            return
        assert time.monotonic() < deadline, kinds
        await asyncio.sleep(0.02)


async def _details(client: Client, request: str) -> str:
    handle = client.get_workflow_handle(redrive_id(request))
    return str(await handle.query("__temporal_workflow_metadata", result_type=dict))


async def test_it_takes_the_set_in_chunks_and_tells_how_far_it_is(client: Client, scene: Scene) -> None:
    seed(scene.database, 25)
    scene.freeze("r", DeadFilter(receiver="one"))
    async with workers(client, scene.activities(chunk=10)):
        handle = await _runs(client).start_redrive("r", "one")
        report = await handle.result()
        assert report == {"state": "COMPLETED", "total": 25, "taken": 25, "skipped": 0}
        assert "25 of 25 dead letters pending again, 0 skipped" in await _details(client, "r")
    assert scene.woken == [["one"]] * 3
    assert scene.state("r") == ("COMPLETED", 25, 0)
    described = await handle.describe()
    assert dict((pair.key.name, pair.value) for pair in described.typed_search_attributes)["Receiver"] == "one"


async def test_started_twice_it_is_one_run_and_after_its_end_it_does_nothing(client: Client, scene: Scene) -> None:
    seed(scene.database, 5)
    scene.freeze("r")
    runs = _runs(client)
    first = await runs.start_redrive("r", None)
    second = await runs.start_redrive("r", None)
    assert first.first_execution_run_id == second.first_execution_run_id
    async with workers(client, scene.activities(chunk=10)):
        await first.result()
        kill(scene.database, "one", "e-1", error="poison")
        third = await runs.start_redrive("r", None)
        assert (await third.result())["taken"] == 5
    assert scene.woken == [["one"]]
    assert scalar(scene.database, "SELECT count(*) FROM deliveries WHERE status = 'dead'") == 1


async def test_a_cancel_ends_it_after_the_chunk_at_hand(client: Client, scene: Scene) -> None:
    seed(scene.database, 30)
    scene.freeze("r")
    scene.gate = asyncio.Event()
    async with workers(client, scene.activities(chunk=10)):
        handle = await _runs(client).start_redrive("r", None)
        await asyncio.wait_for(scene.held.wait(), 60)
        await handle.cancel()
        await _told_of_its_cancel(handle)
        assert scene.state("r") == ("RUNNING", 10, 0)  # it waits for the chunk at hand
        scene.gate.set()
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
        assert isinstance(failure.value.cause, CancelledError)
        assert "10 of 30 dead letters pending again" in await _details(client, "r")
    assert scene.state("r") == ("CANCELLED", 10, 0)
    assert scene.redrive("r").note == "its run was cancelled"
    assert scalar(scene.database, "SELECT count(*) FROM deliveries WHERE status = 'dead'") == 20


async def test_a_cancel_during_the_last_chunk_finds_it_complete(client: Client, scene: Scene) -> None:
    seed(scene.database, 5)
    scene.freeze("r")
    scene.gate = asyncio.Event()
    async with workers(client, scene.activities(chunk=10)):
        handle = await _runs(client).start_redrive("r", None)
        await asyncio.wait_for(scene.held.wait(), 60)
        await handle.cancel()
        scene.gate.set()
        assert (await handle.result())["state"] == "COMPLETED"
    assert scene.state("r") == ("COMPLETED", 5, 0)


async def test_a_large_one_continues_as_new(short_client: Client, scene: Scene) -> None:
    seed(scene.database, 24)
    scene.freeze("r")
    async with workers(short_client, scene.activities(chunk=1)):
        handle = await _runs(short_client).start_redrive("r", None)
        assert (await handle.result())["taken"] == 24
    latest = await short_client.get_workflow_handle(redrive_id("r")).describe()
    assert latest.run_id != handle.first_execution_run_id
    assert await latest.memo() == {"summary": "redrive r"}
    assert scene.state("r") == ("COMPLETED", 24, 0)


async def test_one_that_there_is_not_fails_and_says_so(client: Client, scene: Scene) -> None:
    async with workers(client, scene.activities(chunk=1)):
        handle = await _runs(client).start_redrive("nobody", None)
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
    assert isinstance(failure.value.cause, ActivityError)
    assert isinstance(failure.value.cause.cause, ApplicationError)
    assert failure.value.cause.cause.type == "NotFound"


async def test_a_wake_that_fails_costs_nothing(scene: Scene) -> None:
    seed(scene.database, 5)
    scene.freeze("r")

    async def fail(_: Sequence[str]) -> None:
        raise RuntimeError("Temporal is away")

    redriving = RedriveActivities(scene.writer, fail)
    beats: list[int] = []
    environment = ActivityEnvironment()
    environment.on_heartbeat = beats.append
    report = await environment.run(redriving.redrive_chunk, RedriveInput("r"))
    assert report == RedriveReport("COMPLETED", 5, 5, 0)
    assert beats == [5]


_WORKER = """
import asyncio, sys
from temporalio.client import Client
from activities.redriving import RedriveActivities
from pipeline.writer import Writer
from store.engine import Database
from store.redrives import get_redrive
from worker import steps_worker

async def main():
    database = Database(sys.argv[1])

    async def wake(_):
        with database.read() as connection:
            taken = get_redrive(connection, "r").taken
        if taken >= 5000:
            print(taken, flush=True)
            await asyncio.Event().wait()  # committed and not acknowledged: killed here

    redriving = RedriveActivities(Writer(database), wake, chunk=1000)
    client = await Client.connect(sys.argv[2], namespace=sys.argv[3])
    await steps_worker(client, [redriving.redrive_chunk, redriving.cancel_redrive]).run()

asyncio.run(main())
"""


async def test_10001_items_and_the_worker_is_killed_at_the_middle(
    client: Client, temporal_server: TemporalServer, scene: Scene
) -> None:
    seed(scene.database, 10_001)
    scene.freeze("r")
    url = scene.database.url.render_as_string()
    with Script(_WORKER, url, temporal_server.address, client.namespace) as worker:
        handle = await _runs(client).start_redrive("r", None)
        assert await asyncio.to_thread(worker.line) == "5000"
    assert scene.state("r") == ("RUNNING", 5000, 0)
    async with workers(client, scene.activities(chunk=2000)):
        assert await handle.result() == {"state": "COMPLETED", "total": 10_001, "taken": 10_001, "skipped": 0}
    assert scalar(scene.database, "SELECT count(*) FROM redrive_items WHERE taken_at IS NOT NULL") == 10_001
    assert scalar(scene.database, "SELECT count(*) FROM deliveries WHERE status = 'pending'") == 10_001


class Moody(Receiver):
    """Takes what is not in `bad`; its effect is a line in `mail_messages`."""

    name = "one"
    event_types = frozenset({TYPE})

    def __init__(self, *bad: str) -> None:
        self.bad = set(bad)

    def deliver(self, connection: Connection, event: Event) -> None:
        connection.exec_driver_sql(
            "INSERT INTO mail_messages (position, order_id, subject)"
            f" VALUES ({event.position}, '{event.event_id}', 's')"
        )
        if event.event_id in self.bad:
            raise ValueError(f"no {event.event_id} today")


def _saisei(client: Client, scene: Scene, redis_url: str, receiver: Receiver, **changes: Any) -> SaiseiWorker:
    values: dict[str, Any] = {"look": 0.1, "idle": 0.1, "attempts": 2, "backoff": 0.02, "heartbeat": 6.5} | changes
    settings = Settings(Path("."), scene.database.url.render_as_string(), redis_url, **values)
    return SaiseiWorker(settings, client, scene.database, redis_url, receivers=[receiver])


def _statuses(scene: Scene) -> dict[str, int]:
    return dict(rows(scene.database, "SELECT status, count(*) FROM deliveries GROUP BY status"))  # type: ignore[arg-type]


async def test_what_died_is_delivered_at_once_in_order_and_a_poisonous_one_stops_nobody(
    client: Client, scene: Scene, redis_url: str
) -> None:
    register(scene.database, "one")
    names = [f"k{number}" for number in range(12)]
    for name in names:
        append(scene.database, name, 1, 2, 3)
    receiver = Moody(*(f"{name}-1" for name in names))
    async with _saisei(client, scene, redis_url, receiver) as saisei:
        await _until(lambda: _statuses(scene) == {"dead": 12, "pending": 24}, "the first of each is dead")
        receiver.bad = {"k5-1"}
        scene.freeze("r")
        report = await (await saisei.runs.start_redrive("r", None)).result()
        assert (report["state"], report["taken"]) == ("COMPLETED", 12)
        await _until(lambda: _statuses(scene) == {"done": 33, "dead": 1, "pending": 2}, "all but k5 are delivered")
        assert await (await saisei.runs.start_redrive("r", None)).result() == report
    taken = [row[0] for row in rows(scene.database, "SELECT order_id FROM mail_messages ORDER BY rowid")]
    assert len(taken) == len(set(taken)) == 33
    for name in set(names) - {"k5"}:
        assert [each for each in taken if each.startswith(f"{name}-")] == [f"{name}-{n}" for n in (1, 2, 3)]
    assert rows(
        scene.database, sa.select(deliveries.c.attempts, deliveries.c.last_error).where(sa.text("status = 'dead'"))
    ) == [(2, "ValueError: no k5-1 today")]


async def test_redrives_and_live_retries_at_the_same_moment_deliver_once(
    client: Client, scene: Scene, redis_url: str
) -> None:
    register(scene.database, "one")
    names = [f"k{number}" for number in range(20)]
    for name in names:
        append(scene.database, name, 1)
    receiver = Moody(*(f"{name}-1" for name in names))
    async with _saisei(client, scene, redis_url, receiver, attempts=3) as saisei:
        await _until(lambda: _statuses(scene).get("dead", 0) > 3, "some are dead while others are retried")
        requests, deadline = 0, time.monotonic() + 60
        while _statuses(scene) != {"done": 20}:
            request = f"r{requests}"
            scene.freeze(request)
            await (await saisei.runs.start_redrive(request, None)).result()
            requests += 1
            if requests == 3:
                receiver.bad = set()
            assert time.monotonic() < deadline, _statuses(scene)
    taken = [row[0] for row in rows(scene.database, "SELECT order_id FROM mail_messages")]
    assert sorted(taken) == sorted(f"{name}-1" for name in names)


async def test_the_look_starts_a_redrive_that_has_no_run(client: Client, scene: Scene, redis_url: str) -> None:
    seed(scene.database, 40)
    scene.freeze("r", DeadFilter(receiver="one"), look_in=0)
    async with _saisei(client, scene, redis_url, Moody()):
        await _until(lambda: scene.state("r") == ("COMPLETED", 40, 0), "the look finds it")
        await _until(lambda: _statuses(scene) == {"done": 40}, "and they are delivered")


async def test_the_look_ends_a_redrive_whose_run_was_terminated(client: Client, scene: Scene, redis_url: str) -> None:
    seed(scene.database, 5)
    scene.freeze("r", look_in=0)
    handle = await _runs(client).start_redrive("r", None)
    await handle.terminate("enough")
    async with _saisei(client, scene, redis_url, Moody()):
        await _until(lambda: scene.state("r") == ("CANCELLED", 0, 0), "the look sees what became of its run")
    assert "terminated" in str(scene.redrive("r").note)
    assert (await handle.describe()).status is WorkflowExecutionStatus.TERMINATED

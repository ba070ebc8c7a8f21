"""The look: each kind of loss is repaired, a slow queue is not, and what cannot work is woken less and less."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts.messages import DeliveryInput, FulfilmentInput
from contracts.names import FAN_OUT_ID, OUTBOX_LIST, RELAY_ID, delivery_id, job_workflow_id, receiver_id
from pipeline.look import Look
from pipeline.recovery import recover_outbox
from runs.starts import Runs
from store.clock import now_ms
from store.engine import Database
from store.jobs import COMPLETED, FAILED, JOB_LOOK_MS, RUNNING, begin_job, end_job, get_job
from store.schema import outbox
from store.unfinished import Unfinished
from tests.activities.stages import Recorder, Stages, stages
from tests.store.scenes import append, rows
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


class Wakes(Runs):
    """Runs that only notes who was woken; every long-lived run is there."""

    def __init__(self) -> None:
        super().__init__(None, ["recorder"])  # type: ignore[arg-type]
        self.woken: list[str] = []

    async def wake(self, stages: Iterable[str] | None = None) -> None:
        self.woken += list(stages or [RELAY_ID])


@pytest.fixture
def scene(sqlite: Database, redis_url: str) -> Iterator[Stages]:
    with stages(sqlite, redis_url, Recorder()) as scene:
        yield scene


def look_of(scene: Stages, runs: Runs, receivers: Sequence[str] = ("recorder",), **options: Any) -> Look:
    look = Look(
        scene.writer, scene.events, scene.hub, runs, receivers, **{"lost_after": 30.0, "run_grace": 12.0, **options}
    )
    if isinstance(runs, Wakes):
        look._presence_at = math.inf
    return look


def age(scene: Stages, milliseconds: int = 60_000) -> None:
    """All that was pushed was pushed that much earlier."""
    with scene.database.write() as connection:
        connection.execute(
            sa.update(outbox).values(
                published_at=outbox.c.published_at - milliseconds,
                first_published_at=outbox.c.first_published_at - milliseconds,
            )
        )


@pytest.mark.parametrize("loss", ["DEL", "FLUSHALL"])
async def test_messages_that_redis_lost_go_through_the_relay_again(scene: Stages, loss: str) -> None:
    append(scene.database, "a", 1, 2, 3)
    await scene.drain(scene.relay)
    scene.client.execute_command(loss, *([OUTBOX_LIST] if loss == "DEL" else []))
    runs = Wakes()
    look = look_of(scene, runs)
    await look._lost_messages(await look._database())
    assert runs.woken == []  # pushed a moment ago: another look will tell
    age(scene)
    await look._lost_messages(await look._database())
    assert runs.woken == [RELAY_ID]  # whose drain wakes what follows it
    assert rows(scene.database, "SELECT DISTINCT status FROM outbox") == [("PENDING",)]
    await scene.drain()
    assert scene.effects() == ["a-1", "a-2", "a-3"]
    await look._lost_messages(await look._database())
    assert runs.woken == [RELAY_ID]


async def test_a_part_of_the_list_that_was_lost_is_told_from_what_still_waits(scene: Stages) -> None:
    append(scene.database, "a", 1, 2)
    await scene.drain(scene.relay)
    scene.client.delete(OUTBOX_LIST)
    age(scene)
    append(scene.database, "b", 1)
    await scene.drain(scene.relay)  # what came after is in the list: its head is younger than what was lost
    assert await recover_outbox(scene.writer, scene.events, before=now_ms() - 30_000) == 2
    assert rows(scene.database, "SELECT event_id FROM outbox WHERE status = 'PENDING' ORDER BY position") == [
        ("a-1",),
        ("a-2",),
    ]


async def test_a_slow_queue_of_20_000_entries_is_not_pushed_twice(scene: Stages) -> None:
    count = 20_000
    old = now_ms() - 3_600_000
    with scene.database.write() as connection:
        connection.execute(
            sa.insert(outbox),
            [
                {
                    "event_id": f"e{number}",
                    "aggregate_id": f"a{number}",
                    "seq": 1,
                    "event_type": "thing-happened",
                    "payload": "{}",
                    "status": "PUBLISHED",
                    "published_at": old + number // 100,
                    "first_published_at": old + number // 100,
                }
                for number in range(count)
            ],
        )
    scene.events.push([f"e{number}" for number in range(count)])
    runs = Wakes()
    look = look_of(scene, runs)
    await look._lost_messages(await look._database())
    for _ in range(3):
        await scene.fan_out.step()
        await look._lost_messages(await look._database())
    assert RELAY_ID not in runs.woken
    assert scene.scalar("SELECT count(*) FROM outbox WHERE status = 'PENDING'") == 0
    left = scene.events.length()
    assert 0 < left < count
    scene.client.delete(OUTBOX_LIST)
    assert await recover_outbox(scene.writer, scene.events, before=now_ms()) == left


async def test_a_stalled_stage_is_woken_and_one_that_cannot_work_less_and_less(
    scene: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("pipeline.look.time", SimpleNamespace(monotonic=lambda: clock))  # the loop keeps its own
    append(scene.database, "a", 1)
    runs = Wakes()
    look = look_of(scene, runs)
    at = []
    for second in range(300):
        clock = 1000.0 + second
        before = len(runs.woken)
        await look._stalled_stages(await look._database())
        if len(runs.woken) > before:
            at.append(second)
    assert runs.woken == [RELAY_ID] * len(at)  # its drain wakes what follows it
    assert at[0] == 1  # not at the first sight: a drain may be about to take it
    pauses = [after - before for before, after in pairwise(at)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 32]
    assert set(pauses[6:]) == {60}
    # Once it works again, and then stalls with other work, it is woken soon.
    await scene.drain()
    await look._stalled_stages(await look._database())
    append(scene.database, "b", 1)
    await look._stalled_stages(await look._database())
    woken = len(runs.woken)
    clock += 1
    await look._stalled_stages(await look._database())
    assert runs.woken[woken:] == [RELAY_ID]


async def test_a_stage_that_drains_here_is_left_alone(scene: Stages) -> None:
    append(scene.database, "a", 1)
    runs = Wakes()
    look = look_of(scene, runs)
    with scene.hub.draining(RELAY_ID):
        for _ in range(5):
            await look._stalled_stages(await look._database())
    assert runs.woken == []


async def test_each_stage_is_woken_for_its_own_work(scene: Stages) -> None:
    append(scene.database, "a", 1)
    await scene.drain(scene.relay)
    runs = Wakes()
    look = look_of(scene, runs)
    for _ in range(2):
        await look._stalled_stages(await look._database())
        await look._stalled_fan_out()
    assert runs.woken == [FAN_OUT_ID, receiver_id("recorder")]  # with the receivers, which follow it
    runs.woken.clear()
    await scene.drain(scene.fan_out)
    for _ in range(2):
        await look._stalled_stages(await look._database())
    assert runs.woken == [receiver_id("recorder")]


async def test_redis_or_temporal_down_keeps_the_look_from_nothing_else(
    sqlite: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with stages(sqlite, "redis://127.0.0.1:1", Recorder()) as scene:
        append(sqlite, "a", 1)

        class Down(Wakes):
            async def _start_stage(self, stage: str, *, wake: bool) -> None:
                raise RuntimeError("no connection")

        look = look_of(scene, Down())
        asked: Counter[str] = Counter()
        for name in ("_failing_events", "_jobs", "_presence"):

            async def part(*_: Unfinished, name: str = name) -> None:
                asked[name] += 1

            setattr(look, name, part)
        caplog.set_level("INFO", "pipeline.look")
        for _ in range(3):
            await look.once()
        assert asked == {"_failing_events": 3, "_jobs": 3, "_presence": 3}
        assert len([record for record in caplog.records if "could not see everything" in record.message]) == 1


@pytest.fixture
def reads(scene: Stages, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is read from the database from now on."""
    noted, read = [], scene.writer.read

    async def note(work: Any) -> Any:
        noted.append(work)
        return await read(work)

    monkeypatch.setattr(scene.writer, "read", note)
    return noted


async def test_a_look_reads_the_database_once_and_not_at_all_where_nobody_has_committed(
    scene: Stages, reads: list[Any]
) -> None:
    look = look_of(scene, Wakes())
    found = await look._database()
    append(scene.database, "a", 1)
    await scene.drain(scene.relay)
    scene.client.delete(OUTBOX_LIST)
    reads.clear()
    for _ in range(3):
        await look.once()
    assert len(reads) == 1
    assert (await look._database()).published_at is not None
    assert found.published_at is None


async def test_a_read_that_failed_is_made_again_though_nobody_has_committed(
    scene: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(scene.database, "a", 1)
    look = look_of(scene, Wakes())
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.look.unfinished", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await look._database()
    assert (await look._database()).pending is not None


@pytest.mark.parametrize("due", ["a lost message", "a failing event", "a job"])
async def test_what_the_clock_alone_makes_due_is_found(
    scene: Stages, monkeypatch: pytest.MonkeyPatch, due: str
) -> None:
    started: list[str] = []

    class Starts(Wakes):
        async def start_delivery(self, message: DeliveryInput) -> Any:
            started.append(message.event_id)

        async def start_job(self, message: FulfilmentInput) -> Any:
            started.append(message.job_id)

    runs = Starts()
    append(scene.database, "a", 1)
    if due == "a lost message":
        await scene.drain(scene.relay)
        scene.client.delete(OUTBOX_LIST)
    elif due == "a failing event":
        scene.receivers["recorder"]._receiver.errors = {"a-1": ValueError("bad")}  # type: ignore[attr-defined]
        await scene.drain()
    else:
        await scene.drain()
        with scene.database.write() as connection:
            begin_job(connection, "job-1", 100, now_ms(), now_ms() + 60_000)
    look = look_of(scene, runs)

    async def no_run(workflow_id: str) -> None:
        return None

    monkeypatch.setattr(look, "_run", no_run)
    await look.once()
    assert (runs.woken, started) == ([], [])
    for module in ("look", "retries"):
        monkeypatch.setattr(f"pipeline.{module}.now_ms", lambda: now_ms() + 61_000)
    await look.once()
    expected = {"a lost message": [], "a failing event": ["a-1"], "a job": ["job-1"]}
    assert started == expected[due]
    assert runs.woken == ([RELAY_ID] if due == "a lost message" else [])


async def test_a_run_of_a_failing_event_that_was_terminated_is_started_again(scene: Stages, client: Client) -> None:
    append(scene.database, "a", 1)
    runs = Runs(client, [])
    scene.receivers["recorder"]._receiver.errors = {"a-1": ValueError("bad")}  # type: ignore[attr-defined]
    await scene.drain()
    handle = await runs.start_delivery(DeliveryInput("recorder", "a-1", "a"))
    look = look_of(scene, runs)
    with scene.database.write() as connection:
        connection.execute(sa.text("UPDATE deliveries SET next_attempt_at = next_attempt_at - 2000"))
    await look._failing_events(await look._database())
    assert scene.scalar("SELECT has_run FROM deliveries") == 1
    await look._failing_events(await look._database())
    first = (await client.get_workflow_handle(handle.id).describe()).run_id
    assert first == handle.result_run_id  # it is not overdue yet
    await handle.terminate("a person's mistake")
    with scene.database.write() as connection:
        connection.execute(sa.text("UPDATE deliveries SET next_attempt_at = next_attempt_at - 60000"))
    await look._failing_events(await look._database())
    described = await client.get_workflow_handle(delivery_id("recorder", "a-1")).describe()
    assert described.run_id != first
    assert described.status is not None
    assert described.status.name == "RUNNING"


async def test_a_failing_event_that_falls_due_between_two_looks_gets_its_run_then(
    sqlite: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Starts(Wakes):
        async def start_delivery(self, message: DeliveryInput) -> Any:
            started.append(now_ms())
            if len(started) == 1:
                raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    receiver = Recorder()
    receiver.errors = {"a-1": ValueError("bad"), "b-1": ValueError("bad")}
    with stages(sqlite, redis_url, receiver, backoff=0.2) as scene:
        look = look_of(scene, Starts())

        async def answers() -> None:
            return None

        monkeypatch.setattr(look, "_presence", answers)  # asked as soon as a start fails
        for aggregate in "ab":
            append(sqlite, aggregate, 1)
            await scene.drain()
            if aggregate == "a":
                await look.once()
                resting = asyncio.create_task(look.rest(600))
                await eventually(lambda: started, 60, "a-1 is started before the next look")
        dues = [row[0] for row in rows(sqlite, "SELECT next_attempt_at FROM deliveries ORDER BY position")]
        # Temporal was away; and nobody has looked since b-1 failed. The rest goes on all the same.
        assert not resting.done()
        resting.cancel()
        await look.once()
        resting = asyncio.create_task(look.rest(600))
        await eventually(lambda: len(started) == 2, 60, "b-1 is started before the next look")
        resting.cancel()
        assert [moment >= due for moment, due in zip(started, dues, strict=True)] == [True, True]


async def test_a_job_without_a_run_gets_one(scene: Stages, client: Client) -> None:
    with scene.database.write() as connection:
        begin_job(connection, "job-1", 100, 1, 1)
        begin_job(connection, "job-2", 100, 1, now_ms() + 60_000)
    look = look_of(scene, Runs(client, []))
    await look._jobs(await look._database())
    assert (await client.get_workflow_handle(job_workflow_id("job-1")).describe()).status is not None
    with pytest.raises(Exception, match="not found"):
        await client.get_workflow_handle(job_workflow_id("job-2")).describe()
    assert scene.scalar("SELECT look_at FROM jobs WHERE job_id = 'job-1'") >= now_ms() + JOB_LOOK_MS - 10_000


async def test_a_job_whose_run_was_terminated_is_failed_and_says_how_to_go_on(scene: Stages, client: Client) -> None:
    runs = Runs(client, [])
    with scene.database.write() as connection:
        begin_job(connection, "job-1", 100, 1, 1)
    handle = await runs.start_job(FulfilmentInput("job-1", 100))
    await handle.terminate()
    look = look_of(scene, runs)
    await look._jobs(await look._database())
    with scene.database.read() as connection:
        job = get_job(connection, "job-1")
    assert (job.state, job.error) == (FAILED, "its run was terminated; `job run job-1` resumes it")


async def test_a_long_lived_run_that_was_terminated_is_started_again(scene: Stages, client: Client) -> None:
    runs = Runs(client, ["recorder"])
    look = look_of(scene, runs)
    await look._presence()
    ids = {stage: (await client.get_workflow_handle(stage).describe()).run_id for stage in runs.stages}
    assert set(ids) == {RELAY_ID, FAN_OUT_ID, receiver_id("recorder")}
    await client.get_workflow_handle(FAN_OUT_ID).terminate()
    await look._presence()  # asked a moment ago
    look._presence_at = 0
    await look._presence()
    now = {stage: (await client.get_workflow_handle(stage).describe()).run_id for stage in runs.stages}
    assert [stage for stage in ids if ids[stage] != now[stage]] == [FAN_OUT_ID]
    assert (await client.get_workflow_handle(FAN_OUT_ID).describe()).status.name == "RUNNING"  # type: ignore[union-attr]


async def test_junk_at_the_head_does_not_hide_a_loss_for_ever(scene: Stages) -> None:
    append(scene.database, "a", 1)
    await scene.drain(scene.relay)
    scene.client.delete(OUTBOX_LIST)
    scene.client.rpush(OUTBOX_LIST, b"\xff")
    age(scene)
    assert await recover_outbox(scene.writer, scene.events, before=now_ms()) == 0  # the fan-out takes the junk first
    await scene.drain(scene.fan_out)
    assert await recover_outbox(scene.writer, scene.events, before=now_ms()) == 1


@pytest.mark.parametrize("meanwhile", ["it completed", "it was run again"])
async def test_a_job_that_moved_on_while_the_look_asked_keeps_its_state(
    scene: Stages, client: Client, meanwhile: str
) -> None:
    runs = Runs(client, [])
    with scene.database.write() as connection:
        begin_job(connection, "job-1", 100, 1, 1)
    await (await runs.start_job(FulfilmentInput("job-1", 100))).terminate()
    look = look_of(scene, runs)
    ask = look._run

    async def slow(workflow_id: str) -> Any:
        run = await ask(workflow_id)
        with scene.database.write() as connection:
            if meanwhile == "it completed":
                end_job(connection, "job-1", None)
            else:
                begin_job(connection, "job-1", 100, 1, now_ms() + 60_000)
        return run

    look._run = slow  # type: ignore[method-assign]
    await look._jobs(await look._database())
    with scene.database.read() as connection:
        job = get_job(connection, "job-1")
    assert (job.state, job.error) == (COMPLETED if meanwhile == "it completed" else RUNNING, None)

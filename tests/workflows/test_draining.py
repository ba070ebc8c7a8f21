"""The loop of relay, fan-out and receivers: nothing that wakes it is lost, and it rests in between."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import WorkflowExecutionStartedEventAttributes
from temporalio.client import Client, WorkflowHandle
from temporalio.testing import TimeSkipper

from contracts.messages import DrainInput, DrainReport, ReceiverInput, StageInput, Timings
from contracts.names import RELAY_ID, TASK_QUEUE, receiver_id
from contracts.search import RECEIVER
from runs.starts import Runs
from tests.waiting import eventually
from tests.workflows.workers import events_of, workers
from workflows.draining import DrainLoop
from workflows.relay import RelayWorkflow

pytestmark = pytest.mark.anyio


class Drains:
    """The activity `drain`, which does what the test says."""

    def __init__(self, work: Callable[[DrainInput], Awaitable[DrainReport]] | None = None) -> None:
        self.begun: list[str] = []
        self._work = work

    @activity.defn
    async def drain(self, message: DrainInput) -> DrainReport:
        self.begun.append(message.stage)
        return await self._work(message) if self._work else DrainReport(0, 0, more=False)


async def resting(handle: WorkflowHandle[Any, Any], timers: int = 1) -> bool:
    return len(await events_of(handle, EventType.EVENT_TYPE_TIMER_STARTED)) == timers


async def at_rest(handle: WorkflowHandle[Any, Any]) -> bool:
    return f"**{handle.id}** at rest since" in str(await handle.query("__temporal_workflow_metadata"))


async def test_the_safety_timer_drains_after_15_minutes_of_rest(skipper: TimeSkipper) -> None:
    drains = Drains()
    async with workers(skipper.client, drains=[drains.drain]):
        with skipper.with_time_skipping_disabled():
            handle = await skipper.client.start_workflow(
                RelayWorkflow.run, StageInput(), id=RELAY_ID, task_queue=TASK_QUEUE
            )
        await eventually(lambda: resting(handle), 60, "the relay rests")
        assert await skipper.fast_forward(handle, timedelta(minutes=14, seconds=30))
        assert len(drains.begun) == 1
        assert await skipper.fast_forward(handle, timedelta(minutes=1))
        await eventually(lambda: resting(handle, 2), 60, "it drained and rests again")
        assert drains.begun == [RELAY_ID] * 2


async def test_a_wake_at_rest_drains_at_once(client: Client) -> None:
    drains = Drains()
    async with workers(client, drains=[drains.drain]):
        runs = Runs(client, ["billing"])
        await runs.ensure()
        handle = client.get_workflow_handle(receiver_id("billing"))
        await eventually(lambda: resting(handle), 60, "the receiver rests")
        await runs.wake([receiver_id("billing")])
        await eventually(lambda: resting(handle, 2), 60, "it drained and rests again")
        assert drains.begun.count(receiver_id("billing")) == 2
        assert drains.begun.count(RELAY_ID) == 1


async def test_a_wake_during_a_drain_makes_another_one_follow(client: Client) -> None:
    go_on = asyncio.Event()

    async def work(message: DrainInput) -> DrainReport:
        await go_on.wait()
        return DrainReport(0, 0, more=False)

    drains = Drains(work)
    async with workers(client, drains=[drains.drain]):
        handle = await client.start_workflow(RelayWorkflow.run, StageInput(), id=RELAY_ID, task_queue=TASK_QUEUE)
        await eventually(lambda: drains.begun, 60, "the first drain begins")
        for _ in range(3):
            await handle.signal(RelayWorkflow.wake)
        go_on.set()
        await eventually(lambda: resting(handle), 60, "it rests")
        assert len(drains.begun) == 2


async def test_a_drain_that_has_more_to_do_is_followed_at_once(client: Client) -> None:
    reports = iter([DrainReport(5, 1, more=True), DrainReport(2, 1, more=False)])

    async def work(message: DrainInput) -> DrainReport:
        return next(reports)

    drains = Drains(work)
    async with workers(client, drains=[drains.drain]):
        handle = await client.start_workflow(RelayWorkflow.run, StageInput(), id=RELAY_ID, task_queue=TASK_QUEUE)
        await eventually(lambda: resting(handle), 60, "it rests")
        assert len(drains.begun) == 2


async def test_its_details_say_what_it_does(client: Client) -> None:
    reports = [
        (None, DrainReport(5, 1, more=True)),
        ("draining since", DrainReport(0, 0, more=True, held_since=1, reason="down")),
        ("on hold", DrainReport(1, 1, more=True)),
        ("draining since", DrainReport(0, 0, more=False)),
    ]
    seen: list[tuple[str | None, str]] = []

    async def work(message: DrainInput) -> DrainReport:
        expected, report = reports.pop(0)
        if expected is not None:
            seen.append((expected, str(await handle.query("__temporal_workflow_metadata"))))
        return report

    handle = client.get_workflow_handle(receiver_id("billing"))
    drains = Drains(work)
    async with workers(client, drains=[drains.drain]):
        await Runs(client, ["billing"]).wake([receiver_id("billing")])
        await eventually(lambda: at_rest(handle), 60, "it rests")
    assert len(seen) == 3
    for expected, details in seen:
        assert expected is not None
        assert expected in details


async def test_a_drain_that_fails_goes_on_when_redis_is_back(skipper: TimeSkipper) -> None:
    began = None

    async def work(message: DrainInput) -> DrainReport:
        nonlocal began
        now = activity.info().current_attempt_scheduled_time
        began = began or now
        if now - began < timedelta(minutes=10):
            raise ConnectionError("Redis does not answer")
        return DrainReport(1, 1, more=False)

    drains = Drains(work)
    async with workers(skipper.client, drains=[drains.drain]):
        with skipper.with_time_skipping_disabled():
            handle = await skipper.client.start_workflow(
                RelayWorkflow.run, StageInput(), id=RELAY_ID, task_queue=TASK_QUEUE
            )
        await eventually(lambda: drains.begun, 60, "the first attempt")
        await skipper.fast_forward(handle, timedelta(minutes=11))
        await eventually(lambda: resting(handle), 60, "it drained and rests")
        assert len(drains.begun) > 100  # at most 5 s apart
        [scheduled] = await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)
        attributes = scheduled.activity_task_scheduled_event_attributes
        # Nothing bounds the series: it goes on for ever.
        assert attributes.retry_policy.maximum_attempts == 0
        assert attributes.schedule_to_close_timeout.ToTimedelta() in (timedelta(0), timedelta(days=0))


async def test_no_wake_is_lost_over_continue_as_new(short_client: Client) -> None:
    todo, done = 0, 0

    async def work(message: DrainInput) -> DrainReport:
        nonlocal todo, done
        taken, todo = todo, 0
        done += taken
        return DrainReport(taken, 1, more=False)

    drains = Drains(work)
    billing = receiver_id("billing")
    runs = Runs(short_client, ["billing"])
    handle = short_client.get_workflow_handle(billing)
    async with workers(short_client, drains=[drains.drain]):
        await runs.wake([billing])
        first = (await handle.describe()).run_id
        for _ in range(60):
            todo += 1  # as intake does: the work is there before the wake
            await runs.wake([billing])
        await eventually(lambda: done == 60, 60, "every wake led to a drain that came after it")

        async def begun() -> WorkflowExecutionStartedEventAttributes:
            [event] = await events_of(handle, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED)
            return event.workflow_execution_started_event_attributes

        async def counted() -> ReceiverInput | None:
            """The input of the run, once all drains are counted in it and its history."""
            payloads = (await begun()).input.payloads
            [message] = await short_client.data_converter.decode(list(payloads), [ReceiverInput])
            ended = await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED)
            return message if message.drains + len(ended) == len(drains.begun) else None

        message = await eventually(counted, 60, "the counts are carried over")
        assert 0 < message.events <= 60
        assert message.timings == Timings()
        described = await handle.describe()
        assert described.run_id != first
        # What a person finds it by is there after continue-as-new as well.
        # The SDK cannot carry the static summary: the memo says the same.
        assert await described.static_summary() is None
        assert await described.memo() == {"summary": "deliveries to billing"}
        await eventually(lambda: at_rest(handle), 60, "its details say what it is and does")
        assert described.typed_search_attributes[RECEIVER] == "billing"
        assert "Receiver" in (await begun()).search_attributes.indexed_fields
        summaries = [
            event.user_metadata.summary.data
            for event in await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)
        ]
        assert set(summaries) == {b'"drain receiver/billing"'}


async def test_an_error_in_workflow_code_ends_no_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = DrainLoop._describe

    def broken(self: DrainLoop, *arguments: Any) -> None:
        monkeypatch.setattr(DrainLoop, "_describe", describe)  # as if a corrected worker were deployed at once
        raise KeyError("a bug")

    monkeypatch.setattr(DrainLoop, "_describe", broken)
    drains = Drains()
    async with workers(client, drains=[drains.drain]):
        handle = await client.start_workflow(RelayWorkflow.run, StageInput(), id=RELAY_ID, task_queue=TASK_QUEUE)
        await eventually(lambda: resting(handle), 60, "the run goes on")
        [failed] = await events_of(handle, EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED)
        assert "a bug" in failed.workflow_task_failed_event_attributes.failure.message
        assert drains.begun == [RELAY_ID]

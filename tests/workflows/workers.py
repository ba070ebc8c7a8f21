"""Workers over a test's namespace, and what their runs left in the history."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from contracts.names import DRAIN_TASK_QUEUE, TASK_QUEUE
from worker import WORKFLOWS, end_workers, sandbox

Activities = Sequence[Callable[..., Any]]


@asynccontextmanager
async def workers(
    client: Client, activities: Activities = (), drains: Activities = (), **options: Any
) -> AsyncIterator[None]:
    """All our workflows, with these activities on the common queue and these on the drains' one."""
    started = [
        Worker(
            client,
            task_queue=TASK_QUEUE,
            workflows=WORKFLOWS,
            activities=activities,
            workflow_runner=sandbox(),
            **options,
        )
    ]
    if drains:
        started.append(Worker(client, task_queue=DRAIN_TASK_QUEUE, activities=drains))
    for worker in started:
        await worker.__aenter__()
    try:
        yield
    finally:
        await end_workers(started, longest=5)


async def events_of(handle: WorkflowHandle[Any, Any], kind: "EventType.ValueType") -> list[HistoryEvent]:
    """The events of that kind in the history of the run."""
    return [event for event in (await handle.fetch_history()).events if event.event_type == kind]

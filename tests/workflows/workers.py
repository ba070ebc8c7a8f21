"""Workers over a test's namespace, and what their runs left in the history."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor, Worker

from contracts.names import DRAIN_TASK_QUEUE
from worker import end_workers, steps_worker

BUSY = 15.0  # seconds


class Attempts(Interceptor):
    """The attempts at activities that a worker makes, and the time by the server's clock, which may skip. Each run has
    a clock of its own."""

    def __init__(self) -> None:
        self.running = 0
        self.begun: list[tuple[str, datetime]] = []  # the activity's name, and when the server gave it out
        self._last: dict[str, tuple[datetime, float]] = {}

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Noted(next, self)

    def note(self) -> None:
        info = activity.info()
        self.begun.append((info.activity_type, info.started_time))
        self._last[info.activity_type] = (info.started_time, time.monotonic())

    def of(self, name: str) -> list[datetime]:
        """When each attempt at this activity began."""
        return [moment for activity_type, moment in self.begun if activity_type == name]

    def pauses(self, name: str) -> list[float]:
        """Seconds between them."""
        return [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(self.of(name))]

    def keep(self, name: str, expected: Sequence[float]) -> bool:
        """Whether its first pauses are these (seconds): never shorter, and longer by what a busy machine takes."""
        pauses = self.pauses(name)
        return len(pauses) >= len(expected) and all(
            least - 0.05 <= pause < least + BUSY for pause, least in zip(pauses, expected, strict=False)
        )

    def clock(self, name: str) -> Callable[[], int]:
        """The time of that activity's run (UTC ms): its last attempt's beginning, and what has really gone by since."""

        def now_ms() -> int:
            begun, real = self._last[name]
            return int((begun.timestamp() + time.monotonic() - real) * 1000)

        return now_ms


class _Noted(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, attempts: Attempts) -> None:
        super().__init__(next)
        self._attempts = attempts

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        self._attempts.note()
        self._attempts.running += 1
        try:
            return await super().execute_activity(input)
        finally:
            self._attempts.running -= 1


Activities = Sequence[Callable[..., Any]]


@asynccontextmanager
async def workers(
    client: Client,
    activities: Activities = (),
    drains: Activities = (),
    interceptors: Sequence[Interceptor] = (),
    **options: Any,
) -> AsyncIterator[None]:
    """All our workflows, with these activities on the common queue and these on the drains' one."""
    started = [steps_worker(client, activities, interceptors=interceptors, **options)]
    if drains:
        started.append(Worker(client, task_queue=DRAIN_TASK_QUEUE, activities=drains, interceptors=interceptors))
    for worker in started:
        await worker.__aenter__()
    try:
        yield
    finally:
        await end_workers(started, longest=5)


async def events_of(handle: WorkflowHandle[Any, Any], kind: "EventType.ValueType") -> list[HistoryEvent]:
    """The events of that kind in the history of the run."""
    return [event for event in (await handle.fetch_history()).events if event.event_type == kind]

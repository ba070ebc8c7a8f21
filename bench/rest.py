"""An hour with no orders: history events of the pipeline's runs, and the worker's processor time.

Timers are counted, not waited for: one worker rests with its own timings, for the processor; another one has short
safety timers, and the events of its firings are scaled to as many firings as an hour has.
"""

import asyncio
from collections.abc import Sequence

import psutil
from temporalio.client import Client

from bench.drain import at_rest
from bench.report import Row, row
from bench.stack import RECEIVER_NAMES, Scratch, scratch, wait_for
from contracts.messages import Timings
from runs.starts import Runs
from store.engine import Database

COUNT = 15
FEWER = 10
_HOUR = 3600.0
_SHORT = 5.0  # seconds; a drain that finds nothing goes to rest after one


def run(count: int) -> list[Row]:
    """A window of `count` seconds for each of the two."""
    with scratch() as stack:
        processor, events, drains = asyncio.run(_measure(stack, count))
    firings = _HOUR / Timings().safety_timer
    return [
        row("history events", events / drains * firings * (2 + len(RECEIVER_NAMES)), "an hour", most=400),
        row("processor of the worker", processor * 100, "%", most=1.0),
    ]


async def history_events(client: Client, stages: Sequence[str]) -> int:
    """The events in the current runs of these workflows, all together."""
    runs = await asyncio.gather(*(client.get_workflow_handle(stage).describe() for stage in stages))
    return sum(run.history_length for run in runs)


async def _measure(stack: Scratch, count: int) -> tuple[float, int, float]:
    client = await Client.connect(stack.temporal_address)
    stages = Runs(client, RECEIVER_NAMES).stages
    with stack.worker() as process:
        before = await settled(stack.database, client, stages)
        worker = psutil.Process(process.pid)
        used = sum(worker.cpu_times()[:2])
        await asyncio.sleep(count)
        processor = (sum(worker.cpu_times()[:2]) - used) / count
        quiet = await history_events(client, stages) - before
    with stack.another_database() as database:
        for stage in stages:
            await client.get_workflow_handle(stage).terminate()  # the timings go with the run
        with stack.worker(database=database, env={"SAISEI_SAFETY_TIMER": str(_SHORT)}):
            await asyncio.sleep(_SHORT)
            before, drains = await history_events(client, stages), await count_drains(client, stages)
            await asyncio.sleep(count)
            events = await history_events(client, stages) - before
            drains = await count_drains(client, stages) - drains
    return processor, events + quiet, max(1, drains)


async def count_drains(client: Client, stages: Sequence[str]) -> int:
    """How many drains were scheduled in the current runs of these workflows."""
    count = 0
    for stage in stages:
        history = await client.get_workflow_handle(stage).fetch_history()
        count += sum(event.HasField("activity_task_scheduled_event_attributes") for event in history.events)
    return count


async def settled(database: Database, client: Client, stages: Sequence[str]) -> int:
    """Wait until the relay rests and no run grows any more; the events in the current runs."""
    await asyncio.to_thread(wait_for, lambda: at_rest(database), 0.05)
    events = -1
    while events != (events := await history_events(client, stages)):
        await asyncio.sleep(2)
    return events

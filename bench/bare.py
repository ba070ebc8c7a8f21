"""The floors of `jobs`: workflows of a few lines, as cheap as Temporal has them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from bench.peers import work

_LONGEST = timedelta(seconds=10)
# SQLite has one writer.
_thread = ThreadPoolExecutor(1)


@activity.defn
async def nothing() -> None:
    """Does nothing."""


@activity.defn
async def fulfil_by_hand(job: str) -> None:
    """Both steps of a job, their events and its end, as plain sqlite3 writes them."""
    await asyncio.get_running_loop().run_in_executor(_thread, work.fulfil, job)


async def begin_by_hand(job: str) -> None:
    """The job's row, likewise."""
    await asyncio.get_running_loop().run_in_executor(_thread, work.begin, job)


@workflow.defn
class BareWorkflow:
    """Two local steps that do nothing."""

    @workflow.run
    async def run(self) -> None:
        for _ in range(2):
            await workflow.execute_local_activity(nothing, start_to_close_timeout=_LONGEST)


@workflow.defn
class ByHandWorkflow:
    """One local step that writes what a job writes."""

    @workflow.run
    async def run(self, job: str) -> None:
        await workflow.execute_local_activity(fulfil_by_hand, job, start_to_close_timeout=_LONGEST)

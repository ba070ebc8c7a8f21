"""`charge`, then `ship`: jobs a second, 50 at once and one at a time, with the worker in the same process.

The floor is a bare workflow of two local steps that do nothing, started eagerly. `make bench-peers` compares with
DBOS, which does the same job.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from sqlalchemy import Connection
from temporalio.client import Client
from temporalio.worker import Worker

from bench.bare import BareWorkflow, nothing
from bench.report import Row, median, row
from bench.stack import Scratch, scratch
from config import Settings
from contracts.errors import SaiseiError
from contracts.messages import FulfilmentInput
from store.clock import now_ms
from store.engine import Database
from store.jobs import JOB_LOOK_MS, begin_job
from worker import SaiseiWorker, sandbox

COUNT = 300
AT_ONCE = 50
_RUNS = 3
_ALONE = 5  # so many times less work one at a time

Job = Callable[[str], Awaitable[None]]


def run(count: int) -> list[Row]:
    """`count` jobs a run at once, and a fifth of that one at a time."""
    with scratch() as stack:
        rates = asyncio.run(_measure(stack, count))
    return [
        row(f"jobs, {how}", rates[f"saisei, {how}"], "jobs/s", floor=rates[f"bare, {how}"], least=0.9, by="ratio")
        for how in ("50 at once", "one at a time")
    ]


async def _measure(stack: Scratch, count: int) -> dict[str, float]:
    client = await Client.connect(stack.temporal_address)
    bare = Worker(client, task_queue="bare", workflows=[BareWorkflow], activities=[nothing], workflow_runner=sandbox())

    async def bare_job(name: str) -> None:
        await client.execute_workflow(BareWorkflow.run, id=name, task_queue="bare", request_eager_start=True)

    seconds: dict[str, list[float]] = {}
    database = stack.database
    async with bare, worker_in_process(stack, client, database) as worker:
        ours = job(worker)
        for _ in range(_RUNS):
            for who, work in (("saisei", ours), ("bare", bare_job)):
                at_once, alone = await timed(work, count, AT_ONCE), await timed(work, max(1, count // _ALONE), 1)
                seconds.setdefault(f"{who}, 50 at once", []).append(at_once)
                seconds.setdefault(f"{who}, one at a time", []).append(alone)
    return {what: median(rates) for what, rates in seconds.items()}


def worker_in_process(stack: Scratch, client: Client, database: Database) -> SaiseiWorker:
    """A worker on that database in this process."""
    settings = Settings(stack.home, database.url.render_as_string(), stack.redis_url)
    return SaiseiWorker(settings, client, database, stack.redis_url)


def job(worker: SaiseiWorker) -> Job:
    """One job from its row to its outcome, as `job run` does it."""

    async def one(name: str) -> None:
        def begin(connection: Connection) -> None:
            now = now_ms()
            begin_job(connection, name, 100, now, now + JOB_LOOK_MS)

        await worker.writer.write(begin)
        handle = await worker.runs.start_job(FulfilmentInput(name, 100))
        if (await handle.result())["ship"] != "completed":
            raise SaiseiError(f"job {name} was not shipped")

    return one


async def timed(work: Job, count: int, at_once: int) -> float:
    """So many jobs with new names; how many a second."""
    names = iter([f"bench-{uuid.uuid4()}" for _ in range(count)])

    async def one_after_the_other() -> None:
        for name in names:
            await work(name)

    started = time.monotonic()
    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return count / (time.monotonic() - started)

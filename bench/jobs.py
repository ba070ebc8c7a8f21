"""`charge`, then `ship`: jobs a second, 50 at once and one at a time, with the worker in the same process.

The floors: a bare workflow of two local steps that do nothing, and one that writes the same rows by hand in as many
transactions, each synced to disk. Both are started eagerly, while our pipeline, which sends on what jobs tell, rests.
`make bench-peers` compares with DBOS, which does the same job.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from sqlalchemy import Connection
from temporalio.client import Client
from temporalio.worker import Worker

from bench.bare import BareWorkflow, ByHandWorkflow, begin_by_hand, fulfil_by_hand, nothing
from bench.drain import at_rest
from bench.peers.work import using
from bench.report import Row, median, row
from bench.stack import Scratch, scratch, wait_for
from config import Settings
from contracts.errors import SaiseiError
from contracts.messages import FulfilmentInput
from store.audit import audit
from store.clock import now_ms
from store.engine import Database
from store.jobs import JOB_LOOK_MS, begin_job
from worker import SaiseiWorker, sandbox

COUNT = 300
FEWER = 100
AT_ONCE = 50
_RUNS = 3
_FEWER = 5  # so many times less work one at a time
_AT_ONCE, _ALONE = f"{AT_ONCE} at once", "one at a time"
_BARE, _BY_HAND = "a bare workflow", "the same rows by hand"

Job = Callable[[str], Awaitable[None]]


def run(count: int) -> list[Row]:
    """`count` jobs a run at once, and a fifth of that one at a time."""
    with scratch() as stack:
        rates = asyncio.run(_measure(stack, count))
    rows = []
    for how in (_AT_ONCE, _ALONE):
        ours = rates[f"saisei, {how}"]
        for floor, least in ((_BARE, 0.9), (_BY_HAND, 0.9)):
            rows.append(
                row(f"{how}, beside {floor}", ours, "jobs/s", floor=rates[f"{floor}, {how}"], least=least, by="ratio")
            )
    return rows


async def _measure(stack: Scratch, count: int) -> dict[str, float]:
    client = await Client.connect(stack.temporal_address)
    bare = Worker(
        client,
        task_queue="bare",
        workflows=[BareWorkflow, ByHandWorkflow],
        activities=[nothing, fulfil_by_hand],
        workflow_runner=sandbox("bench"),  # read anew for each run it would cost 3 ms, which a job does not pay
    )

    async def bare_job(name: str) -> None:
        await client.execute_workflow(BareWorkflow.run, id=name, task_queue="bare", request_eager_start=True)

    async def by_hand(name: str) -> None:
        await begin_by_hand(name)
        await client.execute_workflow(ByHandWorkflow.run, name, id=name, task_queue="bare", request_eager_start=True)

    rates: dict[str, list[float]] = {}
    with stack.another_database() as its, using(str(its.url.database)):
        async with bare, worker_in_process(stack, client, stack.database) as worker:
            ways = {"saisei": job(worker), _BARE: bare_job, _BY_HAND: by_hand}
            for _ in range(_RUNS):
                for who, work in ways.items():
                    await asyncio.to_thread(wait_for, lambda: at_rest(stack.database), 0.02)
                    for how, part, together in ((_AT_ONCE, count, AT_ONCE), (_ALONE, max(1, count // _FEWER), 1)):
                        rates.setdefault(f"{who}, {how}", []).append(await timed(work, part, together))
        require_jobs(stack.database, _RUNS * (count + max(1, count // _FEWER)))
        require_jobs(its, _RUNS * (count + max(1, count // _FEWER)))
    return {what: median(each) for what, each in rates.items()}


def require_jobs(database: Database, count: int) -> None:
    """Raises SaiseiError unless the audit is clean and so many jobs were charged once and shipped once."""
    with database.read() as connection:
        found = audit(connection)
    if not found.clean or not found.jobs == found.charges == found.shipments == count:
        raise SaiseiError(f"{found.jobs} jobs, {found.charges} charges, {found.shipments} shipments, {found.breaks}")


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

"""The first orders after a rest, in the whole worker: what becomes of trouble that is met ahead of a run."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from temporalio.client import Client

from config import Settings
from contracts.events import ORDER_PLACED, Event
from contracts.names import receiver_id
from receivers.base import Receiver
from receivers.builtin import Mail, Sales
from store.clock import now_ms
from store.engine import Database
from store.faults import OUTAGE, set_fault
from tests.store.scenes import place, rows, scalar
from tests.waiting import eventually
from worker import SaiseiWorker

pytestmark = pytest.mark.anyio


class Hanging(Receiver):
    """Takes nothing until it is let go."""

    name = "hanging"
    event_types = frozenset({ORDER_PLACED})

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def deliver(self, connection: Connection, event: Event) -> None:
        self.reached.set()
        self.go_on.wait()


def worker_of(client: Client, database: Database, redis_url: str, *receivers: Receiver) -> SaiseiWorker:
    """Its drains last far longer than a test, so that nothing is put right by the next one."""
    settings = Settings(
        home=Path("unused"), database_url=str(database.url), redis_url=redis_url, idle=0.2, look=600, drain=600
    )
    return SaiseiWorker(settings, client, database, redis_url, receivers=receivers)


async def rest(worker: SaiseiWorker, database: Database) -> None:
    """Let one order through and wait until nothing is drained any more: the next one is the first after a rest."""
    place(database, 1)
    await worker.runs.wake()
    done = "SELECT count(*) FROM deliveries WHERE status = 'done'"
    await eventually(lambda: scalar(database, done) == len(worker.receivers), 60, "one order is through")

    def rests() -> bool:
        cold = scalar(database, "SELECT hot_until FROM control") <= now_ms()
        return cold and not any(worker.hub.is_draining(stage) for stage in worker.runs.stages)

    await eventually(rests, 60, "the pipeline rests")


async def test_a_hold_that_begins_ahead_of_the_run_is_told_by_the_run(
    client: Client, sqlite: Database, redis_url: str
) -> None:
    handle = client.get_workflow_handle(receiver_id("sales"))
    async with worker_of(client, sqlite, redis_url, Mail(), Sales()) as worker:
        await rest(worker, sqlite)
        with sqlite.write() as connection:
            set_fault(connection, "sales", OUTAGE)
        place(sqlite, 2)
        await worker.runs.wake()
        held = "SELECT count(*) FROM receivers WHERE receiver = 'sales' AND held_since IS NOT NULL"
        await eventually(lambda: scalar(sqlite, held) == 1, 60, "it is put on hold")

        async def told() -> bool:
            metadata: Any = await handle.query("__temporal_workflow_metadata")
            return "**receiver/sales** on hold since 20" in str(metadata.current_details)

        await eventually(told, 60, "the run says that its receiver is on hold")
    assert rows(sqlite, "SELECT status, attempts FROM deliveries WHERE receiver = 'sales' ORDER BY position") == [
        ("done", 0),
        ("pending", 0),
    ]


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead of its run", "in its run"])
async def test_a_receiver_that_hangs_does_not_keep_the_worker_from_ending(
    client: Client, sqlite: Database, redis_url: str, ahead: bool
) -> None:
    hanging = Hanging()
    worker = worker_of(client, sqlite, redis_url, hanging)
    await worker.__aenter__()
    try:
        hanging.go_on.set()
        await rest(worker, sqlite)
        hanging.reached.clear()
        hanging.go_on.clear()
        if not ahead:
            worker._ahead.after_rest = lambda: None  # type: ignore[method-assign]
            worker._ahead._until = 0.0  # the rest before the first order may be a moment ago
        place(sqlite, 2)
        await worker.runs.wake()
        if not ahead:
            await worker.runs.wake(worker.runs.stages)
        await eventually(hanging.reached.is_set, 60, "it hangs")
        begun = bool(worker._ahead._begun)
        await asyncio.wait_for(worker.__aexit__(None, None, None), 60)
        assert worker.stuck
        assert begun == ahead
    finally:
        hanging.go_on.set()
    done = "SELECT count(*) FROM deliveries WHERE status = 'done'"
    await eventually(lambda: scalar(sqlite, done) == 2, 60, "what it took is committed, once")

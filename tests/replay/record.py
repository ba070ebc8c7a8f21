"""Records a history of every workflow and of each of its ways to end, for test_replay.py.

Run it with `make record-histories` when a workflow was changed on purpose: what stood there before tells whether runs
that are under way survive the change. Nothing of the machine that recorded stays in the files.
"""

import asyncio
import json
import logging
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from config import Settings
from contracts.events import ORDER_PLACED, Event
from contracts.messages import DeliveryInput, FulfilmentInput, RebuildInput, StageInput, Timings
from contracts.names import FAN_OUT_ID, RELAY_ID, TASK_QUEUE, delivery_id, receiver_id
from embedded import TemporalServer, ValkeyServer
from receivers.base import Receiver
from receivers.builtin import Billing
from store.clock import now_ms
from store.control import initialize
from store.dead_letters import DeadFilter
from store.engine import Database
from store.jobs import begin_job
from store.receivers import register_receiver
from store.redrives import freeze_redrive
from tests.servers import fresh_namespace
from tests.store.scenes import place, scalar
from tests.waiting import eventually
from tests.workflows.workers import events_of
from worker import SaiseiWorker

HISTORIES = Path(__file__).with_name("histories")
CONTINUED, RUNNING = "continued-as-new", "running"


class Fussy(Receiver):
    """Never takes order-1, and order-2 only at the third attempt."""

    name = "fussy"
    event_types = frozenset({ORDER_PLACED})

    def __init__(self) -> None:
        self.attempts = 0

    def deliver(self, connection: Connection, event: Event) -> None:
        if event.event_id == "order-1:placed":
            raise ValueError("never")
        if event.event_id == "order-2:placed":
            self.attempts += 1
            if self.attempts < 3:
                raise ValueError("not yet")


def normalized(history: dict[str, Any]) -> dict[str, Any]:
    """Without identities, stack traces and what else differs between machines."""

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(inner, name) for name, inner in value.items() if name != "stackTrace"}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if key == "identity":
            return "worker"
        if key == "buildId":
            return "build"
        # Names of sticky queues are made of the process and its host.
        return re.sub(r"\d+@[^\"/\s]+", "worker", value) if isinstance(value, str) else value

    walked = walk(history)
    assert isinstance(walked, dict)
    return walked


async def save(name: str, handle: WorkflowHandle[Any, Any]) -> None:
    """Write the history of the run into its file."""
    history = await handle.fetch_history()
    document = normalized(json.loads(history.to_json()))
    (HISTORIES / f"{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"{name}: {len(document['events'])} events")


@asynccontextmanager
async def stack() -> AsyncIterator[tuple[Client, Database, str]]:
    """Servers and a database that are gone afterwards; runs continue as new after 40 events."""
    home = Path(tempfile.mkdtemp(prefix="saisei-record-"))
    temporal = TemporalServer(home, headless=True, dynamic_config={"limit.historyCount.suggestContinueAsNew": 40})
    valkey = ValkeyServer(home)
    try:
        for server in (temporal, valkey):
            server.start()
        temporal.wait_ready()
        valkey.wait_ready()
        database = Database(f"sqlite:///{home}/saisei.db")
        with database.write() as connection:
            initialize(connection, 1)
            register_receiver(connection, "parked", [ORDER_PLACED])
        yield await fresh_namespace(temporal), database, valkey.url
        database.close()
    finally:
        temporal.kill()
        valkey.kill()
        shutil.rmtree(home, ignore_errors=True)


async def record_jobs(worker: SaiseiWorker) -> None:
    """Fulfilment: completed at once; failed, then resumed."""

    async def run(name: str, message: FulfilmentInput) -> None:
        with worker.database.write() as connection:
            begin_job(connection, message.job_id, message.amount, 1, 1 << 60)
        handle = await worker.runs.start_job(message)
        try:
            await handle.result()
        except WorkflowFailureError:
            assert message.ship_fails
        await save(name, worker.runs.client.get_workflow_handle(handle.id, run_id=handle.result_run_id))

    await run("fulfilment-completed", FulfilmentInput("job-1", 100))
    await run("fulfilment-failed", FulfilmentInput("job-2", 200, ship_fails=True, ship_attempts=1))
    await run("fulfilment-resumed", FulfilmentInput("job-2", 200))


async def record_deliveries(worker: SaiseiWorker) -> None:
    """Delivery: retried and done, retried and dead; by hand done and failed."""
    client = worker.runs.client
    for name, number in (("dead", 1), ("retried", 2)):
        handle = client.get_workflow_handle(delivery_id("fussy", f"order-{number}:placed"))
        await handle.result()
        await save(f"delivery-{name}", handle)
    for name, fail in (("by-hand-failed", True), ("by-hand", False)):
        message = DeliveryInput("parked", "order-3:placed", "order/order-3", manual=True, fail=fail)
        started = await worker.runs.start_delivery(message)
        try:
            await started.result()
        except WorkflowFailureError:
            assert fail
        await save(f"delivery-{name}", client.get_workflow_handle(started.id, run_id=started.result_run_id))


async def record_redrive(worker: SaiseiWorker) -> None:
    """Redrive: the dead letter of `delivery-dead` becomes pending again."""
    with worker.database.write() as connection:
        freeze_redrive(connection, "request-1", DeadFilter(), now_ms(), 1 << 60)
    handle = await worker.runs.start_redrive("request-1", "fussy")
    await handle.result()
    await save("redrive-completed", handle)


async def record_rebuilds(worker: SaiseiWorker) -> None:
    """Rebuild: completed, and ended by a person."""
    for name in ("completed", "cancelled"):
        handle = await worker.runs.start_rebuild(RebuildInput(resume=True, phase_bound=60))
        if name == "cancelled":
            await handle.cancel()
        try:
            await handle.result()
        except WorkflowFailureError:
            assert name == "cancelled"
        await save(f"rebuild-{name}", worker.runs.client.get_workflow_handle(handle.id, run_id=handle.result_run_id))


async def record_stages(worker: SaiseiWorker) -> None:
    """Relay, fan-out and a receiver: the run that continued as new, and the one after it."""
    client = worker.runs.client
    stages = {"relay": RELAY_ID, "fan-out": FAN_OUT_ID, "receiver": receiver_id("billing")}
    first = {name: (await client.get_workflow_handle(stage).describe()).run_id for name, stage in stages.items()}
    for name, stage in stages.items():

        async def continued(name: str = name, stage: str = stage) -> bool:
            await worker.runs.wake([stage])
            return (await client.get_workflow_handle(stage).describe()).run_id != first[name]

        await eventually(continued, 60, f"{name} continues as new")
        await save(f"{name}-{CONTINUED}", client.get_workflow_handle(stage, run_id=first[name]))
        await save(f"{name}-{RUNNING}", client.get_workflow_handle(stage))

    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        "RelayWorkflow", StageInput(Timings(safety_timer=0.2)), id="relay-timer", task_queue=TASK_QUEUE
    )
    fired = EventType.EVENT_TYPE_TIMER_FIRED
    await eventually(lambda: events_of(handle, fired), 60, "the safety timer fires")
    await handle.terminate()
    await save("relay-safety-timer", handle)


async def record() -> None:
    """All of it."""
    logging.disable(logging.CRITICAL)  # failures are what is recorded
    HISTORIES.mkdir(exist_ok=True)
    for old in HISTORIES.glob("*.json"):
        old.unlink()

    class Parked(Billing):
        """Is delivered to by hand only."""

        name = "parked"

    async with stack() as (client, database, redis_url):
        settings = Settings(
            home=Path("unused"), database_url="", redis_url=redis_url, idle=0.05, look=0.2, attempts=3, backoff=0.05
        )
        async with SaiseiWorker(
            settings,
            client,
            database,
            redis_url,
            receivers=[Billing(), Fussy(), Parked()],
            draining=["billing", "fussy"],
        ) as worker:
            place(database, 1, 2, 3)
            await worker.runs.wake()
            await eventually(
                lambda: scalar(database, "SELECT count(*) FROM deliveries WHERE status IN ('done', 'dead')") == 6,
                30,
                "the orders are delivered",
            )
            await record_deliveries(worker)
            await record_jobs(worker)
            await record_redrive(worker)
            await record_rebuilds(worker)
            await record_stages(worker)


if __name__ == "__main__":
    asyncio.run(record())

"""A receiver on hold, in the whole worker: its run says since when and why, writes little, and goes on at once."""

from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from config import Settings
from contracts.names import receiver_id
from receivers.builtin import Mail, Sales
from store.engine import Database
from store.faults import OUTAGE, clear_fault, set_fault
from tests.store.scenes import place, rows, scalar
from tests.waiting import eventually
from worker import SaiseiWorker

pytestmark = pytest.mark.anyio


def counts(database: Database, receiver: str) -> dict[str, int]:
    statement = f"SELECT status, count(*) FROM deliveries WHERE receiver = '{receiver}' GROUP BY status"
    return dict(rows(database, statement))  # type: ignore[arg-type]


async def test_a_held_receiver_says_so_writes_little_history_and_goes_on_within_seconds(
    client: Client, sqlite: Database, redis_url: str
) -> None:
    settings = Settings(
        home=Path("unused"), database_url=str(sqlite.url), redis_url=redis_url, idle=0.2, look=0.1, backoff=0.1
    )
    handle = client.get_workflow_handle(receiver_id("sales"))

    async def details() -> str:
        metadata: Any = await handle.query("__temporal_workflow_metadata")
        return str(metadata.current_details)

    async def drains() -> int:
        events = (await handle.fetch_history()).events
        return sum(each.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED for each in events)

    async with SaiseiWorker(settings, client, sqlite, redis_url, receivers=[Mail(), Sales()]) as worker:
        with sqlite.write() as connection:
            set_fault(connection, "sales", OUTAGE)
        place(sqlite, *range(1, 51))
        await worker.runs.wake()
        await eventually(lambda: counts(sqlite, "mail") == {"done": 50}, 60, "mail notices nothing")

        async def on_hold() -> bool:
            return "on hold since" in await details()

        await eventually(on_hold, 60, "the run says that its receiver is on hold")
        said = await details()
        assert "**receiver/sales** on hold since 20" in said
        assert "ReceiverUnavailable: sales is switched off (fault on --mode outage)" in said
        before = await drains()
        probes = worker.receivers["sales"]
        tried = 0
        original = probes.deliver_batch

        def counting(*args: Any) -> None:
            nonlocal tried
            tried += 1
            original(*args)

        probes.deliver_batch = counting  # type: ignore[method-assign]
        await eventually(lambda: tried >= 5, 60, "it is probed")
        # However often it is probed, a minute on hold is one drain, with the few events that a drain has.
        assert await drains() <= before + 1
        assert counts(sqlite, "sales") == {"pending": 50}
        with sqlite.write() as connection:
            clear_fault(connection, "sales")
        await eventually(lambda: counts(sqlite, "sales") == {"done": 50}, 60, "it goes on")

        async def as_ever() -> bool:
            return "on hold" not in await details()

        await eventually(as_ever, 60, "the run says that all is well")
    assert scalar(sqlite, "SELECT max(attempts) FROM deliveries") == 0
    assert rows(sqlite, "SELECT orders FROM sales_totals") == [(50,)]

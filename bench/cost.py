"""History events a thousand orders, of all the pipeline's runs together: while it drains, and at a steady rate.

At the steady rate the drains are cut short and counted, and scaled to as many as there are at their real length.
"""

import asyncio
import time
from functools import partial

from temporalio.client import Client

from bench.drain import release
from bench.report import Row, row
from bench.rest import count_drains, history_events, settled
from bench.stack import RECEIVER_NAMES, Scratch, order_ids, record, require_clean, scratch
from config import Settings
from contracts.orders import Order
from intake import Intake
from runs.starts import Runs

COUNT = 20_000
_RATE = 50.0  # orders a second
_SHORT = 2.0  # seconds of a drain that is cut short
_STEADY = 10.0  # seconds


def run(count: int) -> list[Row]:
    """`count` orders while draining."""
    with scratch() as stack:
        draining = asyncio.run(_draining(stack, count))
        a_drain = asyncio.run(_steady(stack))
    drains = (2 + len(RECEIVER_NAMES)) * 1000 / _RATE / Settings.from_env({}).drain
    return [
        row("while draining", draining * 1000 / count, "events", most=5),
        row(f"at a steady {_RATE:g} orders/s", a_drain * drains, "events", most=40),
    ]


async def _draining(stack: Scratch, count: int) -> int:
    """The events from the wake until every run rests again."""
    client = await Client.connect(stack.temporal_address)
    stages = Runs(client, RECEIVER_NAMES).stages
    with stack.worker():
        before = await settled(stack.database, client, stages)
        await asyncio.to_thread(release, stack, stack.database, partial(record, stack.database, order_ids(count)))
        events = await settled(stack.database, client, stages) - before
    require_clean(stack.database, count)
    return events


async def _steady(stack: Scratch) -> float:
    """The events of one drain of one stage while orders come in."""
    client = await Client.connect(stack.temporal_address)
    runs = Runs(client, RECEIVER_NAMES)
    with stack.another_database() as database:
        intake = Intake(database, runs.wake)
        with stack.worker(database=database, env={"SAISEI_DRAIN": str(_SHORT)}):
            await _place(intake, "before", 2 * _SHORT)
            events, drains = await history_events(client, runs.stages), await count_drains(client, runs.stages)
            await _place(intake, "then", _STEADY)
            events = await history_events(client, runs.stages) - events
            drains = await count_drains(client, runs.stages) - drains
    return events / max(1, drains)


async def _place(intake: Intake, prefix: str, seconds: float) -> None:
    started = time.monotonic()
    for number, order_id in enumerate(order_ids(int(seconds * _RATE), prefix=prefix)):
        await asyncio.sleep(max(0.0, started + number / _RATE - time.monotonic()))
        placed = await asyncio.to_thread(intake.place, Order(order_id, "sku", 1, 100, "JPY"))
        await intake.wake_if_cold(placed)

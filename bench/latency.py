"""From placing an order to the last receiver: at a steady rate, and for the first order after a rest.

The floor is the plain loop over the same store functions in a process of its own, fed at the same rate. The clock
begins before the order's transaction; what the receivers have done is seen by whoever placed the orders.
"""

import asyncio
import math
import sqlite3
import threading
import time

from temporalio.client import Client

from bench.drain import at_rest
from bench.report import Row, median, percentile, row
from bench.stack import RECEIVER_NAMES, Scratch, order_ids, require_clean, scratch, wait_for
from contracts.orders import Order
from intake import Intake
from runs.starts import Runs
from store.engine import Database

COUNT = 1000
FEWER = 300
_RATE = 50.0  # orders a second
_WARM = 50  # orders before the measured ones: a start is the row of the first order's, which is measured cold
_ROUNDS = 3  # of the loop and the pipeline in turn: what else the machine does meets both
_FIRSTS = 3
_LOOK = 0.0005  # seconds between two looks at the receivers
_LAST = (
    "SELECT min((SELECT coalesce(max(position), 0) FROM billing_entries), "
    "(SELECT coalesce(max(position), 0) FROM mail_messages), "
    "(SELECT coalesce(max(position), 0) FROM sales_applied WHERE generation = 'initial'))"
)


def run(count: int) -> list[Row]:
    """`count` orders at a steady rate, 20 ms apart, in rounds; each begins with a second that neither side counts."""
    floor: list[float] = []
    ours: list[float] = []
    first: list[float] = []
    with scratch() as stack:
        for _ in range(_ROUNDS):
            asyncio.run(_measure(stack, math.ceil(count / _ROUNDS), floor, ours, first))
    floor.sort()
    ours.sort()
    rows = []
    for name, share, most in (("p50", 0.5, 1.5), ("p99", 0.99, 2.0)):
        value = percentile(ours, share)
        rows.append(row(f"{_RATE:g}/s, {name}", value, "ms", floor=percentile(floor, share), most=most, by="ratio"))
    rows.append(row("first order after rest, p50", median(first), "ms", most=50))
    return rows


async def _measure(stack: Scratch, count: int, floor: list[float], ours: list[float], first: list[float]) -> None:
    with stack.another_database() as database:
        arguments = ("-m", "bench.loop", database.url.render_as_string(), stack.redis_url)
        with stack.program(arguments, "loop ready"):
            floor += await _steady(Intake(database, _nobody), database, count)
            require_clean(database, _WARM + count)
    with stack.another_database() as database, stack.worker(database=database):
        runs = Runs(await Client.connect(stack.temporal_address), RECEIVER_NAMES)
        intake = Intake(database, runs.wake)
        ours += await _steady(intake, database, count)
        first += await _after_rest(intake, database)
        require_clean(database, _WARM + count + _FIRSTS)


async def _steady(intake: Intake, database: Database, count: int) -> list[float]:
    """Place so many orders at the rate, behind those that warm up; the milliseconds of each."""
    placed: list[float] = []
    seen = _Watch(database)
    with seen:
        started = time.monotonic()
        for number, order_id in enumerate(order_ids(_WARM + count, prefix="steady")):
            await asyncio.sleep(max(0.0, started + number / _RATE - time.monotonic()))
            placed.append(time.monotonic())
            await _place(intake, order_id)
        await asyncio.to_thread(wait_for, lambda: seen.last >= _WARM + count, 0.01)
    return [(seen.at(position) - at) * 1000 for position, at in enumerate(placed, 1) if position > _WARM]


async def _after_rest(intake: Intake, database: Database) -> list[float]:
    firsts = []
    with _Watch(database) as seen:
        for order_id in order_ids(_FIRSTS, prefix="first"):
            await asyncio.to_thread(wait_for, lambda: at_rest(database), 0.02)
            await asyncio.sleep(1)  # the stages behind the relay go to rest after it
            before = seen.last
            started = time.monotonic()
            await _place(intake, order_id)
            while seen.last == before:
                await asyncio.sleep(_LOOK)
            firsts.append((seen.at(before + 1) - started) * 1000)
    return firsts


async def _place(intake: Intake, order_id: str) -> None:
    placed = await asyncio.to_thread(intake.place, Order(order_id, "sku", 1, 100, "JPY"))
    await intake.wake_if_cold(placed)


class _Watch:
    """Notes when the receivers have done the event at each position. A thread of its own, for the block."""

    def __init__(self, database: Database) -> None:
        self._path = str(database.url.database)
        self._times: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.last = 0

    def at(self, position: int) -> float:
        """When all receivers had done it."""
        return next(when for last, when in self._times if last >= position)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        # Asking whether anybody has written is so cheap that it takes nothing from what is measured.
        connection = sqlite3.connect(self._path, isolation_level=None)
        version = None
        while not self._stop.wait(_LOOK):
            now = connection.execute("PRAGMA data_version").fetchone()[0]
            if now != version:
                version = now
                last = connection.execute(_LAST).fetchone()[0]
                if last > self.last:
                    self._times.append((last, time.monotonic()))
                    self.last = last
        connection.close()


async def _nobody() -> None:
    """The plain loop looks by itself."""

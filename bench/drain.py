"""From the release of recorded orders until each receiver is done with them.

The floor is a plain loop over the same store functions, on the same disk and the same Valkey, in the same run: no
Temporal, one thread, one stage after the other.
"""

import asyncio
import time

from temporalio.client import Client

from bench.report import Row, row
from bench.stack import RECEIVER_NAMES, Scratch, is_done, open_database, record, scratch, wait_for
from contracts.errors import SaiseiError
from pipeline import event_list
from pipeline.event_list import EventList
from receivers.registry import RECEIVERS
from runs.starts import Runs
from store.clock import iso, now_ms
from store.deliveries import mark_done, next_batch
from store.engine import Database
from store.fanout import fan_out
from store.outbox import mark_published, pending_events

_BATCH = 1000
_MOST_RATIO = 1.5


def run(count: int) -> list[Row]:
    """`count` recorded orders."""
    with scratch() as stack:
        floor = _plain_loop(stack, count)
        with stack.worker():
            record(stack.database, count)
            done = asyncio.run(_release(stack))
        with stack.database.read() as connection:
            entries = connection.exec_driver_sql("SELECT count(*) FROM billing_entries").scalar()
        if entries != count:
            raise SaiseiError(f"{count} orders came to {entries} billing entries")
    rows = [row(f"{name} done", seconds, "s") for name, seconds in done.items()]
    last = max(done.values())
    rows.append(row("all done", last, "s", floor=floor, most=_MOST_RATIO, by="ratio"))
    rows.append(row("throughput", count / last, "events/s", floor=count / floor))
    return rows


async def _release(stack: Scratch) -> dict[str, float]:
    runs = Runs(await Client.connect(stack.temporal_address), RECEIVER_NAMES)
    started = time.monotonic()
    await runs.wake()
    done: dict[str, float] = {}

    def look() -> bool:
        with stack.database.read() as connection:
            for name in RECEIVER_NAMES:
                if name not in done and is_done(connection, name):
                    done[name] = time.monotonic() - started
        return len(done) == len(RECEIVER_NAMES)

    await asyncio.to_thread(wait_for, look, 0.01)
    return done


def _plain_loop(stack: Scratch, count: int) -> float:
    database = open_database(stack.home / "floor.db")
    events = EventList(event_list.connect(stack.redis_url))
    try:
        record(database, count)
        started = time.monotonic()
        while sum((_relay(database, events), _fan_out(database, events), *(_receive(database)))):
            pass
        return time.monotonic() - started
    finally:
        events.close()
        database.close()


def _relay(database: Database, events: EventList) -> int:
    with database.read() as connection:
        batch = pending_events(connection, _BATCH)
    if batch:
        events.push([event_id for _, event_id in batch])
        with database.write() as connection:
            mark_published(connection, [position for position, _ in batch], now_ms())
    return len(batch)


def _fan_out(database: Database, events: EventList) -> int:
    entries = events.head(_BATCH)
    if entries:
        with database.write() as connection:
            done = fan_out(connection, entries, now_ms())
        events.remove(entries, done.event_ids, iso(now_ms()) or "")
    return len(entries)


def _receive(database: Database) -> list[int]:
    taken = []
    for receiver in RECEIVERS:
        with database.write() as connection:
            batch = next_batch(connection, receiver.name, _BATCH)
            if batch:
                receiver.deliver_batch(connection, batch)
                mark_done(connection, receiver.name, [event.position for event in batch])
        taken.append(len(batch))
    return taken

"""From the release of recorded orders until every receiver is done with each of them and the audit is clean.

The floors: a plain loop over the same store functions, and one written by hand with sqlite3 and redis that writes the
same rows. Each run has a new database on the same disk and the same Valkey; medians of interleaved runs.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from temporalio.client import Client

from bench.handwritten import HandWritten
from bench.loop import PlainLoop
from bench.report import Row, median, row
from bench.stack import RECEIVER_NAMES, Scratch, is_done, order_ids, record, require_clean, scratch, wait_for
from runs.starts import Runs
from store.control import read_control
from store.engine import Database

COUNT = 50_000
FEWER = 15_000
_RUNS = 3
ORDERED, RANDOM = "ordered ids", "random ids"


def run(count: int) -> list[Row]:
    """`count` recorded orders a run."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with scratch() as stack:
        for _ in range(_RUNS):
            for ids in (ORDERED, RANDOM):
                orders = order_ids(count, ordered=ids == ORDERED)
                seconds[f"saisei, {ids}"].append(drain_once(stack, orders))
                seconds[f"loop, {ids}"].append(_floor(stack, orders, plain_loop))
                seconds[f"by hand, {ids}"].append(_floor(stack, orders, _by_hand))
    rate = {what: count / median(each) for what, each in seconds.items()}
    rows = []
    for ids in (ORDERED, RANDOM):
        ours = rate[f"saisei, {ids}"]
        rows.append(
            row(f"{ids}, beside a plain loop", ours, "events/s", floor=rate[f"loop, {ids}"], least=0.95, by="ratio")
        )
        rows.append(
            row(
                f"{ids}, beside sqlite3 and redis by hand",
                ours,
                "events/s",
                floor=rate[f"by hand, {ids}"],
                least=0.8,
                by="ratio",
            )
        )
    ordered, randomly = rate[f"saisei, {ORDERED}"], rate[f"saisei, {RANDOM}"]
    rows.append(row("random ids beside ordered ones", randomly, "events/s", floor=ordered, least=0.85, by="ratio"))
    return rows


def drain_once(stack: Scratch, ids: Sequence[str]) -> float:
    """Saisei's seconds for these orders on a new database, from the wake to the last receiver; audited."""
    with stack.another_database() as database, stack.worker(database=database):
        seconds = release(stack, database, lambda: record(database, ids))
        require_clean(database, len(ids))
    return seconds


def release(stack: Scratch, database: Database, recording: Callable[[], None]) -> float:
    """Let `recording` write while the pipeline is at rest, then wake it; the seconds until every receiver is done."""
    return max(release_each(stack, database, recording).values())


def release_each(stack: Scratch, database: Database, recording: Callable[[], None]) -> dict[str, float]:
    """As `release`: receiver -> its seconds."""

    async def wake() -> float:
        runs = Runs(await Client.connect(stack.temporal_address), RECEIVER_NAMES)
        await asyncio.to_thread(wait_for, lambda: at_rest(database), 0.02)
        await asyncio.to_thread(recording)
        started = time.monotonic()
        await runs.wake()
        return started

    started = asyncio.run(wake())
    done: dict[str, float] = {}

    def look() -> bool:
        with database.read() as connection:
            for name in RECEIVER_NAMES:
                if name not in done and is_done(connection, name):
                    done[name] = time.monotonic() - started
        return len(done) == len(RECEIVER_NAMES)

    wait_for(look, 0.01)
    return done


def at_rest(database: Database) -> bool:
    """Whether nobody drains the outbox: what is recorded now stays until somebody wakes the pipeline."""
    with database.read() as connection:
        return read_control(connection).hot_until == 0


def plain_loop(database: Database, redis_url: str) -> float:
    """The plain loop's seconds for what is recorded."""
    loop = PlainLoop(database, redis_url)
    try:
        return loop.drain()
    finally:
        loop.close()


def _by_hand(database: Database, redis_url: str) -> float:
    hand = HandWritten(str(database.url.database), redis_url)
    try:
        return hand.drain()
    finally:
        hand.close()


def _floor(stack: Scratch, ids: Sequence[str], work: Callable[[Database, str], float]) -> float:
    with stack.another_database() as database:
        record(database, ids)
        seconds = work(database, stack.redis_url)
        require_clean(database, len(ids))
    return seconds

"""The floor of the pipeline: the same store functions, one stage after the other in one thread, and no Temporal.

`python -m bench.loop DATABASE REDIS` runs it until it is terminated, for benchmarks that want it in a process.
"""

import sys
import time

from pipeline import event_list
from pipeline.event_list import EventList
from receivers.registry import RECEIVERS
from store.clock import iso, now_ms
from store.deliveries import mark_done, next_batch
from store.engine import Database
from store.fanout import fan_out
from store.outbox import mark_published, pending_events

_BATCH = 2000
_PAUSE = 0.001


class PlainLoop:
    """Relay, fan-out and receivers in turn, each batch in a transaction of its own, as the stages do it."""

    def __init__(self, database: Database, redis_url: str) -> None:
        self._database = database
        self._events = EventList(event_list.connect(redis_url))

    def turn(self) -> int:
        """One batch of each stage; how many events moved."""
        return self._relay() + self._fan_out() + sum(self._receive())

    def drain(self) -> float:
        """Until nothing moves; the seconds that it took."""
        started = time.monotonic()
        while self.turn():
            pass
        return time.monotonic() - started

    def close(self) -> None:
        """Give the connections to Redis back."""
        self._events.close()

    def _relay(self) -> int:
        with self._database.read() as connection:
            batch = pending_events(connection, _BATCH)
        if batch:
            self._events.push([event_id for _, event_id in batch])
            with self._database.write() as connection:
                mark_published(connection, [position for position, _ in batch], now_ms())
        return len(batch)

    def _fan_out(self) -> int:
        entries = self._events.head(_BATCH)
        if entries:
            with self._database.write() as connection:
                done = fan_out(connection, entries, now_ms())
            self._events.remove(entries, done.event_ids, iso(now_ms()) or "")
        return len(entries)

    def _receive(self) -> list[int]:
        taken = []
        for receiver in RECEIVERS:
            with self._database.read() as connection:
                waiting = bool(next_batch(connection, receiver.name, 1))
            if not waiting:
                continue  # an empty write transaction would take the lock from whoever places orders
            with self._database.write() as connection:
                batch = next_batch(connection, receiver.name, _BATCH)
                if batch:
                    receiver.deliver_batch(connection, batch)
                    mark_done(connection, receiver.name, batch.positions)
            taken.append(len(batch))
        return taken


def main(url: str, redis_url: str) -> None:
    """Drain for ever."""
    loop = PlainLoop(Database(url), redis_url)
    print("loop ready", flush=True)
    while True:
        if not loop.turn():
            time.sleep(_PAUSE)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

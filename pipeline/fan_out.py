"""The fan-out: entries of the list become deliveries, and leave the list after that commit."""

import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from contracts.names import FAN_OUT_ID, RELAY_ID
from pipeline.event_list import EventList
from pipeline.hub import Hub
from pipeline.stage import BatchSize
from pipeline.writer import Writer
from store.clock import iso, now_ms
from store.control import read_control
from store.fanout import FannedOut, fan_out
from store.receivers import Hold


class FanOutStage:
    """Drains the Redis list; `next_stages` are told when deliveries are there for them."""

    name = FAN_OUT_ID
    fed_by: str | None = RELAY_ID
    watch: Callable[[], bool] | None = None
    more = False
    hold: Hold | None = None
    waits: str | None = None

    def __init__(self, writer: Writer, events: EventList, hub: Hub, next_stages: Sequence[str]) -> None:
        self._writer = writer
        self._events = events
        self._hub = hub
        self._next_stages = tuple(next_stages)
        self._size = BatchSize()

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def sees_work(self) -> bool:
        """The list is read by the step."""
        return True

    async def step(self) -> int:
        """Fan one batch of entries out; how many entries left the list."""
        most = self._size.value
        entries = await self._writer.call(lambda: self._events.head(most))
        self.more = len(entries) == most
        if not entries:
            return 0
        done = await self._writer.write(lambda connection: self._register(connection, entries))
        if done.deliveries:  # what nobody takes is nobody's work: each receiver would ask for the write lock
            self._hub.notify(self._next_stages)
        await self._writer.call(lambda: self._events.remove(entries, done.event_ids, iso(now_ms()) or ""))
        return len(entries)

    async def may_rest(self, idle: float) -> bool:
        """Once the relay rests (its lease is over) and the list is empty."""
        if not await relay_rests(self._writer):
            return False
        return await self._writer.call(self._events.length) == 0

    def _register(self, connection: Connection, entries: Sequence[bytes]) -> FannedOut:
        started = time.monotonic()
        done = fan_out(connection, entries, now_ms())
        self._size.observe(len(entries), time.monotonic() - started)
        return done


async def relay_rests(writer: Writer) -> bool:
    """Whether nobody drains the outbox: from here on whoever adds work wakes the relay, which begins all stages."""
    control = await writer.read(read_control)
    return control.hot_until <= now_ms()

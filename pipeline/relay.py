"""The relay: reads what is `PENDING`, pushes it to the list, marks it `PUBLISHED`. It claims nothing.

A twin, or a crash between push and mark, only makes duplicates, which the fan-out drops by event id. The push happens
in no transaction: a slow Redis holds no lock.
"""

import time
from collections.abc import Callable

from sqlalchemy import Connection

from contracts.names import FAN_OUT_ID, RELAY_ID
from pipeline.event_list import EventList
from pipeline.hub import Hub
from pipeline.stage import BatchSize
from pipeline.writer import Writer
from store.clock import now_ms
from store.control import clear_lease, hold_lease, read_control
from store.outbox import ANY_PENDING, mark_published, pending_events
from store.receivers import Hold

# Nobody waits for the mark: it joins the transaction of the fan-out, which has just been told.
_PATIENCE = 0.005


class RelayStage:
    """Drains the outbox and holds the pipeline's lease while it does."""

    name = RELAY_ID
    fed_by: str | None = None
    more = False
    hold: Hold | None = None
    waits: str | None = None

    def __init__(
        self,
        writer: Writer,
        events: EventList,
        hub: Hub,
        *,
        lease: float,
        after_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`lease` in seconds: how long intake trusts that this drain is alive. `after_rest` is told when a drain begins
        while nobody held it."""
        self._writer = writer
        self._events = events
        self._hub = hub
        self._lease_ms = int(lease * 1000)
        self._after_rest = after_rest
        self._renew_at = 0
        self._size = BatchSize()
        self._changes = writer.changes()
        self.watch = self._stirs if self._changes.can_tell else None

    async def begin(self) -> None:
        """Take the lease before anything is read: from here on intake sends no wakes."""
        if await self._writer.write(self._begin):
            self._after_rest()

    async def sees_work(self) -> bool:
        """Whether anything waits, where that can be told without a read."""
        return self._stirs()

    def _stirs(self) -> bool:
        if not self._changes.worth_a_look():
            return False
        # The stages behind commit, too: three of four commits would be read after in vain.
        waits = self._changes.finds(ANY_PENDING)
        if not waits:
            self._changes.found_nothing()
        return waits

    async def step(self) -> int:
        """Read, push, mark one batch."""
        most = self._size.value
        batch = await self._writer.read(lambda connection: pending_events(connection, most))
        self.more = len(batch) == most
        if not batch:
            return 0
        await self._writer.call(lambda: self._events.push([event_id for _, event_id in batch]))
        self._hub.notify([FAN_OUT_ID])
        await self._writer.write(
            lambda connection: self._mark(connection, [position for position, _ in batch]), patience=_PATIENCE
        )
        return len(batch)

    async def may_rest(self, idle: float) -> bool:
        """Clear the lease, look once more, and stay if something came meanwhile."""
        return await self._writer.write(self._rest)

    def _mark(self, connection: Connection, positions: list[int]) -> None:
        started = time.monotonic()
        mark_published(connection, positions, now_ms())
        if now_ms() >= self._renew_at:
            self._hold_lease(connection)
        self._size.observe(len(positions), time.monotonic() - started)

    def _begin(self, connection: Connection) -> bool:
        rested = read_control(connection).hot_until <= now_ms()
        self._hold_lease(connection)
        return rested

    def _hold_lease(self, connection: Connection) -> None:
        now = now_ms()
        hold_lease(connection, now + self._lease_ms)
        self._renew_at = now + self._lease_ms // 3

    def _rest(self, connection: Connection) -> bool:
        clear_lease(connection)
        if not pending_events(connection, 1):
            return True
        self._hold_lease(connection)
        return False

"""A batch of events of which only the positions are read: what they hold is loaded when somebody asks for it.

A receiver whose effect is one statement over the outbox needs positions and nothing else, and reading and parsing the
payloads cost more than the rest of its work.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, overload

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import Event
from store.dialect import Rendered, pack, value_list
from store.schema import outbox

# The columns that an Event is made of, in its order.
EVENT = (
    outbox.c.position,
    outbox.c.event_id,
    outbox.c.aggregate_id,
    outbox.c.seq,
    outbox.c.event_type,
    outbox.c.payload,
)


def _chosen(connection: Connection) -> Any:
    chosen = value_list(connection, "positions", int)
    return sa.select(*EVENT).join_from(chosen, outbox, outbox.c.position == chosen.c.value)


_CHOSEN = Rendered(_chosen, "positions")


class EventBatch(Sequence[Event]):
    """Events in order, as a sequence; valid within the transaction that it was read in.

    A slice is a batch again and shares what was loaded.
    """

    def __init__(
        self, connection: Connection, positions: Sequence[int], loaded: dict[int, Event] | None = None
    ) -> None:
        """`positions`: of the events, in order."""
        self._connection = connection
        self.positions = positions
        self._loaded = {} if loaded is None else loaded
        # Index of the event that an iteration stands at, None before the first and after the last one: where whoever
        # goes through the events stopped.
        self.stands_at: int | None = None

    def without(self, aggregate_ids: Collection[str]) -> "EventBatch":
        """The events of other aggregates than these."""
        if not aggregate_ids:
            return self
        self._load()
        kept = [position for position in self.positions if self._loaded[position].aggregate_id not in aggregate_ids]
        return EventBatch(self._connection, kept, self._loaded)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Event]:
        self._load()
        for index, position in enumerate(self.positions):
            self.stands_at = index
            yield self._loaded[position]
        self.stands_at = None

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> "EventBatch": ...

    def __getitem__(self, index: int | slice) -> "Event | EventBatch":
        if isinstance(index, slice):
            return EventBatch(self._connection, self.positions[index], self._loaded)
        self._load()
        return self._loaded[self.positions[index]]

    def _load(self) -> None:
        missing = [position for position in self.positions if position not in self._loaded]
        if not missing:
            return
        rows = _CHOSEN.rows(self._connection, pack(self._connection, missing))
        self._loaded.update((row[0], Event(*row)) for row in rows)


def positions_of(events: Sequence[Event]) -> Sequence[int]:
    """The positions of events, without loading a batch."""
    return events.positions if isinstance(events, EventBatch) else [event.position for event in events]

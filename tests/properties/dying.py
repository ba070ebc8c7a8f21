"""Parts of a worker that die at a chosen instant, and receivers that fail where they are told to."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import StoreBusy
from contracts.events import Event
from pipeline.event_list import EventList
from pipeline.writer import Writer
from receivers.base import Receiver, ReceiverUnavailable, RejectEvent
from tests.properties.strategies import Death

T = TypeVar("T")

# What a receiver took, in the order of the commits. No key: an effect that happens twice stands here twice.
journal = sa.Table(
    "property_journal",
    sa.MetaData(),
    sa.Column("n", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("receiver", sa.Text, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sqlite_autoincrement=True,
)


class Died(Exception):
    """The worker's process ended here."""


class DyingWriter(Writer):
    """Dies at a write transaction when it is armed."""

    _left = 0
    _committed = False

    def arm(self, death: Death | None) -> None:
        """Dies as it says; None disarms."""
        self._left = death.write if death else 0
        self._committed = bool(death and death.committed)

    async def timed_write(self, work: Callable[[Connection], T], *, patience: float = 0.0) -> tuple[T, float]:
        self._left -= 1
        if self._left:
            return await super().timed_write(work, patience=patience)
        if self._committed:
            await super().timed_write(work, patience=patience)
            raise Died

        def unfinished(connection: Connection) -> T:
            work(connection)
            raise Died

        return await super().timed_write(unfinished, patience=patience)


class DyingList(EventList):
    """Dies after a push, or before a removal, when it is armed."""

    _armed = False

    def arm(self, death: Death | None) -> None:
        """Dies at the next call if it says so; None disarms."""
        self._armed = death is not None and death.write == 0

    def push(self, event_ids: Sequence[str]) -> None:
        super().push(event_ids)
        if self._armed:
            raise Died

    def remove(self, entries: Sequence[bytes], processed: Sequence[str], when: str) -> None:
        if self._armed:
            raise Died
        super().remove(entries, processed, when)


def _bad(event: Event) -> Exception:
    return ValueError(f"cannot take {event.event_id}")


LATE = "bad once it is written"
MOODS: dict[str, Callable[[Event], Exception]] = {
    "bad": _bad,
    LATE: _bad,
    "rejected": lambda event: RejectEvent(event.event_id),
    "away": lambda event: ReceiverUnavailable(event.event_id),
    "our database is busy": lambda event: StoreBusy("the database is busy"),
}


class Witness(Receiver):
    """A real receiver that notes what it took, and fails for the events that `moods` names (event id -> mood)."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.name = receiver.name  # type: ignore[misc]
        self.event_types = receiver.event_types  # type: ignore[misc]
        self.moods: dict[str, str] = {}

    def deliver(self, connection: Connection, event: Event) -> None:
        self.deliver_batch(connection, [event])

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        moods = [(event, self.moods[event.event_id]) for event in events if event.event_id in self.moods]
        for event, mood in moods:
            if mood != LATE:
                raise MOODS[mood](event)
        self._receiver.deliver_batch(connection, events)
        rows: list[dict[str, Any]] = [{"receiver": self.name, "position": event.position} for event in events]
        connection.execute(sa.insert(journal), rows)
        for event, mood in moods:
            raise MOODS[mood](event)


class Log(Receiver):
    """Takes both types; what it does is what the witness notes."""

    event_types = frozenset({"order-placed", "order-told"})

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def deliver(self, connection: Connection, event: Event) -> None:
        assert event.payload["order_id"]

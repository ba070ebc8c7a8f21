"""The receiver interface. A receiver names the event types it takes and does one thing for an event.

Its effect is written through the Connection it is given, so that it commits together with the delivery's `done`.
What to raise: `ReceiverUnavailable` when the other side is down (no attempt is spent), `RejectEvent` when the event
can never be taken (a dead letter at once), anything else when this attempt failed (tried again, five times in all).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from sqlalchemy import Connection

from contracts.events import Event


class ReceiverUnavailable(Exception):
    """The receiver's other side is down: hold, and spend no attempt."""


class RejectEvent(Exception):
    """The receiver can never take this event: a dead letter at once."""


class Receiver(ABC):
    """Subclass it, set `name` and `event_types`, write `deliver`, and add an instance in registry.py."""

    name: ClassVar[str]
    event_types: ClassVar[frozenset[str]]

    def described(self) -> str:
        """Its class and module, for a sentence to whoever wrote it."""
        return f"{type(self).__qualname__} of {type(self).__module__}"

    @abstractmethod
    def deliver(self, connection: Connection, event: Event) -> None:
        """Take one event: write its effect through `connection`, keyed by `event.position` (or `event.event_id`).

        Called again for the same event only if the transaction of an earlier call did not commit.
        """

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        """Take several events in order; override it where one statement can do the work of many.

        If it raises, nothing of the batch is kept, and it is called again with fewer of them, down to the one that
        fails alone. Where going through `events` stopped is looked at first, so that takes few calls.
        """
        for event in events:
            self.deliver(connection, event)

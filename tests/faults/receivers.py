"""Receivers of the drills: each writes down what it sees, in the order in which it sees it, repeats and all.

Their tables have no key on the event, so an effect that happens twice is there twice.
"""

from sqlalchemy import Connection, text

from contracts.events import ORDER_PLACED, Event
from receivers.base import Receiver

CHANGED = "drill-changed"  # the later events of an order
POISON = "-poison"  # how the id of a poisoned order ends
HARD = "drill-hard"  # what `Stubborn` refuses while it is told to


class Journal(Receiver):
    """Logs every event of an order."""

    event_types = frozenset({ORDER_PLACED, CHANGED})

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def deliver(self, connection: Connection, event: Event) -> None:
        connection.execute(
            text(f"INSERT INTO {table_of(self.name)} (event_id, aggregate_id, seq) VALUES (:e, :a, :s)"),
            {"e": event.event_id, "a": event.aggregate_id, "s": event.seq},
        )


class Stubborn(Journal):
    """Fails as long as the table `drill_switch` has a row."""

    event_types = frozenset({HARD})

    def deliver(self, connection: Connection, event: Event) -> None:
        if connection.execute(text("SELECT 1 FROM drill_switch")).first() is not None:
            raise ValueError("told to fail")
        super().deliver(connection, event)


class Picky(Journal):
    """Fails for the events of poisoned orders as long as the table `drill_switch` has a row."""

    def deliver(self, connection: Connection, event: Event) -> None:
        poisoned = event.aggregate_id.endswith(POISON) and event.event_type == ORDER_PLACED
        if poisoned and connection.execute(text("SELECT 1 FROM drill_switch")).first() is not None:
            raise ValueError("poison: cannot take it")
        super().deliver(connection, event)


JOURNALS = ("drill-one", "drill-two")
STUBBORN = "drill-stubborn"
PICKY = "drill-picky"  # only in a worker that is told so
DRILL_RECEIVERS = (*(Journal(name) for name in JOURNALS), Stubborn(STUBBORN))


def table_of(receiver: str) -> str:
    """Where a drill receiver writes."""
    return receiver.replace("-", "_")


def make_tables(connection: Connection) -> None:
    """The drill's own tables."""
    for name in (*JOURNALS, STUBBORN, PICKY):
        connection.execute(
            text(
                f"CREATE TABLE IF NOT EXISTS {table_of(name)} (n INTEGER PRIMARY KEY AUTOINCREMENT, "
                "event_id TEXT NOT NULL, aggregate_id TEXT NOT NULL, seq INTEGER NOT NULL)"
            )
        )
    connection.execute(text("CREATE TABLE IF NOT EXISTS drill_switch (n INTEGER)"))

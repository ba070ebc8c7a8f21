"""Receivers as the database knows them: what each takes, from where on, and the row that is its lock."""

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import Connection

from store.dialect import for_update, insert
from store.schema import outbox, receivers, subscriptions


def register_receiver(connection: Connection, receiver: str, event_types: Iterable[str]) -> None:
    """Make a receiver known; changes nothing for what it takes already.

    A type that is new to it begins with the events that follow: a receiver added to a running shop must not mail
    every customer of the past.
    """
    connection.execute(insert(connection, receivers).values(receiver=receiver).on_conflict_do_nothing())
    last = connection.execute(sa.select(sa.func.coalesce(sa.func.max(outbox.c.position), 0))).scalar_one()
    for event_type in sorted(event_types):
        connection.execute(
            insert(connection, subscriptions)
            .values(receiver=receiver, event_type=event_type, since_position=last)
            .on_conflict_do_nothing()
        )


def registered_receivers(connection: Connection) -> list[str]:
    """Names of all that were ever registered, sorted."""
    return list(connection.execute(sa.select(receivers.c.receiver).order_by(receivers.c.receiver)).scalars())


def lock_receiver(connection: Connection, receiver: str) -> None:
    """Keep twins of one receiver apart until this transaction ends."""
    connection.execute(for_update(connection, sa.select(receivers.c.receiver).where(receivers.c.receiver == receiver)))


def note_progress(connection: Connection, receiver: str, now: int) -> None:
    """The receiver took something at `now` (UTC ms)."""
    connection.execute(sa.update(receivers).where(receivers.c.receiver == receiver).values(last_progress=now))

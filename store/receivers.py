"""Receivers as the database knows them: what each takes, from where on, and the row that is its lock.

Ending one for good: receiver_ends.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from store.dialect import Rendered, for_update, insert
from store.schema import outbox, receiver_ends, receivers, subscriptions


def register_receiver(connection: Connection, receiver: str, event_types: Iterable[str]) -> None:
    """Make a receiver known; changes nothing for what it takes already.

    A type that is new to it begins with the events that follow: a receiver added to a running shop must not mail
    every customer of the past. One that was ended begins so again. One that is just being ended is not ended then:
    it goes on, without what was waived so far.
    """
    connection.execute(insert(connection, receivers).values(receiver=receiver).on_conflict_do_nothing())
    lock_receiver(connection, receiver)
    connection.execute(
        sa.delete(receiver_ends).where(receiver_ends.c.receiver == receiver, receiver_ends.c.ended_at.is_(None))
    )
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


def subscriptions_of(connection: Connection, receiver: str) -> dict[str, int]:
    """Event type -> the position after which the receiver takes its events."""
    rows = connection.execute(
        sa.select(subscriptions.c.event_type, subscriptions.c.since_position)
        .where(subscriptions.c.receiver == receiver)
        .order_by(subscriptions.c.event_type)
    )
    return {row[0]: row[1] for row in rows}


def has_ended() -> sa.ColumnElement[bool]:
    """Whether the receiver of a `receivers` row was ended and not registered again since."""
    return sa.and_(
        sa.exists().where(receiver_ends.c.receiver == receivers.c.receiver, receiver_ends.c.ended_at.is_not(None)),
        ~sa.exists().where(subscriptions.c.receiver == receivers.c.receiver),
    )


def current_receivers(connection: Connection) -> list[str]:
    """Names of those that were not ended, sorted."""
    return list(
        connection.execute(sa.select(receivers.c.receiver).where(~has_ended()).order_by(receivers.c.receiver)).scalars()
    )


def note_progress(connection: Connection, receiver: str, now: int) -> None:
    """The receiver took something at `now` (UTC ms)."""
    connection.execute(sa.update(receivers).where(receivers.c.receiver == receiver).values(last_progress=now))


@dataclass(frozen=True)
class Hold:
    """A receiver is down: since when (UTC ms) and why. Its deliveries wait in order, and no attempt is spent."""

    since: int
    reason: str


_HOLD = sa.select(receivers.c.held_since, receivers.c.reason).where(receivers.c.receiver == sa.bindparam("receiver"))


_GET_HOLD = Rendered(lambda _: _HOLD, "receiver")
_LOCK = Rendered(lambda connection: for_update(connection, _HOLD), "receiver")


def lock_receiver(connection: Connection, receiver: str) -> Hold | None:
    """Keep twins of one receiver apart until this transaction ends; the receiver's hold, or None while it is up."""
    return _as_hold(_LOCK.rows(connection, receiver))


def get_hold(connection: Connection, receiver: str) -> Hold | None:
    """The receiver's hold, or None while it is up."""
    return _as_hold(_GET_HOLD.rows(connection, receiver))


def _as_hold(found: Sequence[Sequence[Any]]) -> Hold | None:
    return Hold(found[0][0], found[0][1] or "") if found and found[0][0] is not None else None


def hold_receiver(connection: Connection, receiver: str, reason: str, now: int) -> Hold:
    """Put the receiver on hold from `now` (UTC ms); one that is on hold keeps its beginning and first reason."""
    connection.execute(
        sa.update(receivers)
        .where(receivers.c.receiver == receiver, receivers.c.held_since.is_(None))
        .values(held_since=now, reason=reason)
    )
    return get_hold(connection, receiver) or Hold(now, reason)


def release_receiver(connection: Connection, receiver: str) -> None:
    """The receiver is back."""
    connection.execute(
        sa.update(receivers).where(receivers.c.receiver == receiver).values(held_since=None, reason=None)
    )


def last_progress(connection: Connection, receiver: str) -> int:
    """When the receiver last took something (UTC ms, noted about once a second), or 0."""
    return (
        connection.execute(
            sa.select(receivers.c.last_progress).where(receivers.c.receiver == receiver)
        ).scalar_one_or_none()
        or 0
    )

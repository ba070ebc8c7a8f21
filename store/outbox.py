"""The outbox: events are appended in the transaction of the change that they tell of, and found by state.

There is no cursor over positions: commit order is not position order, and a cursor would skip the late one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, NotFound
from contracts.events import Event, payload_text
from contracts.identifiers import order_placed_id
from store.batch import EVENT
from store.dialect import Rendered, at_most, insert, lock_aggregates, pack, value_list
from store.schema import PENDING, PUBLISHED, outbox

# What waits for the relay and what is in Redis, each as its partial index has it.
NOT_FANNED_OUT = (
    f"outbox.status = '{PENDING}'",
    f"outbox.status = '{PUBLISHED}' AND outbox.fanned_out_at IS NULL",
)

ANY_PENDING = f"SELECT 1 FROM outbox WHERE {NOT_FANNED_OUT[0]} LIMIT 1"


@dataclass(frozen=True)
class OutboxRow:
    """An event and where it stands on its way to the receivers. Times: UTC ms or None."""

    event: Event
    status: str
    published_at: int | None
    fanned_out_at: int | None


_FIRST = Rendered(lambda _: sa.insert(outbox).inline(), "event_id", "aggregate_id", "seq", "event_type", "payload")
_RECORDED = sa.select(*EVENT).where(outbox.c.event_id == sa.bindparam("event_id"))


def _append(connection: Connection) -> Any:
    given = [sa.bindparam(name, type_=sa.Text) for name in _GIVEN]
    seq = sa.func.coalesce(sa.func.max(outbox.c.seq), sa.literal_column("0")) + sa.literal_column("1")
    following = sa.select(*given, seq).where(outbox.c.aggregate_id == sa.bindparam("of_aggregate", type_=sa.Text))
    # The id may be recorded, or on its way in another aggregate, whose lock is not ours.
    statement = insert(connection, outbox).from_select([*_GIVEN, "seq"], following)
    return statement.on_conflict_do_nothing(index_elements=["event_id"]).returning(outbox.c.position, outbox.c.seq)


_GIVEN = ("event_id", "aggregate_id", "event_type", "payload")
_APPEND = Rendered(_append, *_GIVEN, "of_aggregate")


def append_event(
    connection: Connection,
    *,
    event_id: str,
    aggregate_id: str,
    event_type: str,
    payload: Mapping[str, Any],
) -> tuple[Event, bool]:
    """Write an event as the next of its aggregate; the event, and whether it is new.

    The same event id again with the same content changes nothing. Raises Conflict when the id tells of something
    else already.
    """
    body = payload_text(payload)
    lock_aggregates(connection, [aggregate_id])
    new = _APPEND.rows(connection, event_id, aggregate_id, event_type, body, aggregate_id)
    if not new:
        return _recorded(connection, event_id, aggregate_id, event_type, body), False
    ((position, seq),) = new
    return Event(position, event_id, aggregate_id, seq, event_type, body), True


def append_first_events(connection: Connection, events: Sequence[tuple[str, str, str, Mapping[str, Any]]]) -> None:
    """(event id, aggregate id, type, payload) of events that are each the first of an aggregate of its own. The
    caller has locked these. The database refuses them all if one of the ids or aggregates has an event already."""
    _FIRST.each(
        connection,
        [
            (event_id, aggregate_id, 1, event_type, payload_text(payload))
            for event_id, aggregate_id, event_type, payload in events
        ],
    )


def _recorded(connection: Connection, event_id: str, aggregate_id: str, event_type: str, body: str) -> Event:
    event = Event(*connection.execute(_RECORDED, {"event_id": event_id}).one())
    if (event.aggregate_id, event.event_type, event.body) != (aggregate_id, event_type, body):
        raise Conflict(f"event {event_id} was recorded before with other content; nothing was changed")
    return event


_PENDING = Rendered(
    lambda _: at_most(
        sa.select(outbox.c.position, outbox.c.event_id)
        .where(outbox.c.status == sa.literal_column(f"'{PENDING}'"))
        .order_by(outbox.c.position),
        "limit",
    ),
    "limit",
)


def pending_events(connection: Connection, limit: int) -> Sequence[Sequence[Any]]:
    """(position, event id) of events that wait for the relay, in position order, which is `seq` order within an
    aggregate. At most `limit`."""
    return _PENDING.many(connection, limit)


def _mark_published(connection: Connection) -> Any:
    chosen = value_list(connection, "positions", int)
    now = sa.bindparam("now", type_=sa.BigInteger)
    return (
        sa.update(outbox)
        .where(outbox.c.position.in_(sa.select(chosen.c.value)))
        .values(
            status=sa.literal_column(f"'{PUBLISHED}'"),
            published_at=now,
            first_published_at=sa.func.coalesce(outbox.c.first_published_at, now),
        )
    )


_MARK_PUBLISHED = Rendered(_mark_published, "now", "now", "positions")


def mark_published(connection: Connection, positions: Sequence[int], now: int) -> None:
    """These were pushed at `now` (UTC ms). Marks exactly what was pushed: what was inserted meanwhile stays."""
    _MARK_PUBLISHED.count(connection, now, now, pack(connection, positions))


def lost_events(connection: Connection, *, before: int, head: str | None, limit: int) -> list[int]:
    """Positions of events that Redis lost: published before `before` (UTC ms), not fanned out, and the list is empty
    (`head` None) or its first entry, `head`, was published later than they were.

    By age alone a slow queue would be pushed again for ever, and double each time. The head's entry may be an old one
    whose event was pushed once more since, so its event's first push counts, which is never later than the entry's.
    """
    if head is not None:
        head_published = connection.execute(
            sa.select(outbox.c.first_published_at).where(outbox.c.event_id == head)
        ).scalar_one_or_none()
        if head_published is None:
            # Not an event, or not marked yet: the fan-out takes it first, and the next look knows more.
            return []
        before = min(before, head_published)
    return list(
        connection.execute(
            sa.select(outbox.c.position)
            .where(
                outbox.c.status == sa.literal_column(f"'{PUBLISHED}'"),
                outbox.c.fanned_out_at.is_(None),
                outbox.c.published_at < before,
            )
            .order_by(outbox.c.published_at, outbox.c.position)
            .limit(limit)
        ).scalars()
    )


def reset_to_pending(connection: Connection, positions: Sequence[int]) -> int:
    """These go through the relay again unless they were fanned out meanwhile; how many do."""
    chosen = value_list(connection, "positions", int)
    return connection.execute(
        sa.update(outbox)
        .where(
            outbox.c.position.in_(sa.select(chosen.c.value)),
            outbox.c.fanned_out_at.is_(None),
            outbox.c.status == PUBLISHED,
        )
        .values(status=PENDING),
        {"positions": pack(connection, positions)},
    ).rowcount


def publish_again(connection: Connection, event_id: str) -> Event:
    """Send a recorded event through the relay and the fan-out once more. Missing deliveries are added, present ones
    keep their state. Raises NotFound."""
    row = connection.execute(
        sa.update(outbox)
        .where(outbox.c.event_id == event_id)
        .values(status=PENDING, fanned_out_at=None)
        .returning(*EVENT)
    ).one_or_none()
    if row is None:
        raise NotFound(_no_event(event_id))
    return Event(*row)


def find_event(connection: Connection, name: str) -> OutboxRow:
    """The event of that id, or the `order-placed` event of the order of that id. Raises NotFound."""
    columns = (*EVENT, outbox.c.status, outbox.c.published_at, outbox.c.fanned_out_at)
    for event_id in (name, order_placed_id(name)):
        row = connection.execute(sa.select(*columns).where(outbox.c.event_id == event_id)).one_or_none()
        if row is not None:
            return OutboxRow(Event(*row[:6]), *row[6:])
    raise NotFound(_no_event(name))


def events_of(connection: Connection, aggregate_id: str) -> list[OutboxRow]:
    """All events of one aggregate, in order."""
    columns = (*EVENT, outbox.c.status, outbox.c.published_at, outbox.c.fanned_out_at)
    rows = connection.execute(sa.select(*columns).where(outbox.c.aggregate_id == aggregate_id).order_by(outbox.c.seq))
    return [OutboxRow(Event(*row[:6]), *row[6:]) for row in rows]


def _no_event(event_id: str) -> str:
    return f"there is no event {event_id}; an order's event is named like order-7:placed"


def outbox_at_rest(connection: Connection) -> bool:
    """Whether every event has its deliveries: none waits for the relay, none is in Redis."""
    for condition in NOT_FANNED_OUT:
        if connection.execute(sa.select(outbox.c.position).where(sa.text(condition)).limit(1)).first() is not None:
            return False
    return True

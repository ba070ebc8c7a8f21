"""Dead letters: which there are, and letting one go for good (`waive`). Making them pending again: redrives.py.

A filter means the same in a listing, a count and a redrive. What is waived stays on record: who, when and why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, InvalidInput, NotFound, Refused
from contracts.identifiers import order_placed_id
from store.clock import iso
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED, load_delivery
from store.dialect import index_of, storable
from store.receivers import lock_receiver, registered_receivers
from store.schema import deliveries, outbox

MAX_REASON = 500
MAX_PAGE = 1000
_NO_ERROR = ""
# As the index says it, beside the state itself: SQLite takes a partial index only where its condition stands.
_SET_ASIDE = sa.text("deliveries.status IN ('dead', 'waived')")


@dataclass(frozen=True)
class DeadFilter:
    """Which dead letters; what is None does not narrow.

    `event`: an event id, or an order id for its `order-placed`. `error`: text that the last error holds, case and all.
    `since`: UTC ms when it died, or later. `since_said`: the same as a person said it (`2h`), which two requests are
    compared by: two hours before now is another instant each time.
    """

    receiver: str | None = None
    event: str | None = None
    aggregate: str | None = None
    error: str | None = None
    since: int | None = None
    since_said: str | None = None

    def is_empty(self) -> bool:
        """Whether it lets everything through."""
        return self == DeadFilter()


@dataclass(frozen=True)
class DeadLetter:
    """One event that one receiver could not take. `settled_at`: UTC ms when it died or was waived; `waiting`: later
    events of its aggregate that wait behind it there; `reason`, `settled_by`: of a waiver."""

    receiver: str
    event_id: str
    aggregate_id: str
    seq: int
    event_type: str
    attempts: int
    error: str | None
    settled_at: int | None
    waiting: int
    reason: str | None
    settled_by: str | None


@dataclass(frozen=True)
class ReceiverTotal:
    """Dead letters of one receiver; `oldest`, `newest`: UTC ms when they died."""

    receiver: str
    count: int
    oldest: int | None
    newest: int | None


@dataclass(frozen=True)
class ErrorTotal:
    """Dead letters of one receiver by the kind of their last error (its text up to the colon), with one example."""

    receiver: str
    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class Waiver:
    """An event that a person let go at one receiver. `at`: UTC ms; `created`: now, rather than by an earlier call."""

    receiver: str
    event_id: str
    aggregate_id: str
    reason: str
    by: str
    at: int
    created: bool

    def sentence(self) -> str:
        """Who waived it, when and why."""
        return f"{self.event_id} was waived at {self.receiver} by {self.by} at {iso(self.at)}: {self.reason}"


def resolve(connection: Connection, filters: DeadFilter) -> DeadFilter:
    """The filter with ids as the store has them: an order's id becomes its event's.

    Raises NotFound for a receiver or an event that there is not: a slip of the pen must not look like "none are dead".
    """
    if filters.receiver is not None:
        require_receiver(connection, filters.receiver)
    if filters.event is None:
        return filters
    return DeadFilter(
        filters.receiver,
        find_event(connection, filters.event),
        filters.aggregate,
        filters.error,
        filters.since,
        filters.since_said,
    )


def find_event(connection: Connection, name: str) -> str:
    """The event of that id, else the `order-placed` of that order. Raises NotFound."""
    wanted = (name, order_placed_id(name))
    found = set(connection.execute(sa.select(outbox.c.event_id).where(outbox.c.event_id.in_(wanted))).scalars())
    for event_id in wanted:
        if event_id in found:
            return event_id
    raise NotFound(f"there is no event {name}, nor an order of that id")


def matching(
    connection: Connection, filters: DeadFilter, *columns: sa.ColumnElement[Any], status: str = DEAD
) -> sa.Select[Any]:
    """`columns` of what the resolved filter lets through and has that state, joined with its event."""
    conditions: list[Any] = [_SET_ASIDE, sa.text(f"deliveries.status = '{status}'")]
    if filters.receiver is not None:
        conditions.append(deliveries.c.receiver == filters.receiver)
    if filters.event is not None:
        conditions.append(outbox.c.event_id == filters.event)
    if filters.aggregate is not None:
        conditions.append(deliveries.c.aggregate_id == filters.aggregate)
    if filters.error is not None:
        conditions.append(index_of(connection, _error(), filters.error) > 0)
    if filters.since is not None:
        conditions.append(deliveries.c.settled_at >= filters.since)
    return (
        sa.select(*columns)
        .select_from(deliveries.join(outbox, outbox.c.position == deliveries.c.position))
        .where(*conditions)
    )


def totals_by_receiver(connection: Connection, filters: DeadFilter, *, status: str = DEAD) -> list[ReceiverTotal]:
    """How many, of each receiver that has any, by name."""
    at = deliveries.c.settled_at
    rows = connection.execute(
        matching(
            connection, filters, deliveries.c.receiver, sa.func.count(), sa.func.min(at), sa.func.max(at), status=status
        )
        .group_by(deliveries.c.receiver)
        .order_by(deliveries.c.receiver)
    )
    return [ReceiverTotal(*row) for row in rows]


def totals_by_error(
    connection: Connection, filters: DeadFilter, *, status: str = DEAD, limit: int = 50
) -> list[ErrorTotal]:
    """How many of each kind of error at each receiver, the most frequent first, at most `limit` kinds."""
    # By the kind, not the whole text: most texts name the order, and a thousand lines of one each say nothing.
    colon = index_of(connection, _error(), ":")
    kind = sa.case((colon > 0, sa.func.substr(_error(), 1, colon - 1)), else_=_error()).label("kind")
    count = sa.func.count().label("count")
    rows = connection.execute(
        matching(connection, filters, deliveries.c.receiver, kind, count, sa.func.min(_error()), status=status)
        .group_by(deliveries.c.receiver, sa.text("kind"))
        .order_by(count.desc(), deliveries.c.receiver, sa.text("kind"))
        .limit(limit)
    )
    return [ErrorTotal(*row) for row in rows]


def count_dead(connection: Connection, filters: DeadFilter, *, status: str = DEAD) -> int:
    """How many the resolved filter lets through."""
    count: int = connection.execute(matching(connection, filters, sa.func.count(), status=status)).scalar_one()
    return count


def dead_letters(
    connection: Connection, filters: DeadFilter, limit: int = 50, *, status: str = DEAD
) -> list[DeadLetter]:
    """The first of them, by receiver and then in the order that the events happened; at most `limit` (1,000).

    Of a page only: for each it counts what waits behind it.
    """
    later, behind = outbox.alias("later"), deliveries.alias("behind")
    waiting = (
        sa.select(sa.func.count())
        .select_from(later.join(behind, behind.c.position == later.c.position))
        .where(
            later.c.aggregate_id == outbox.c.aggregate_id,
            later.c.seq > outbox.c.seq,
            behind.c.receiver == deliveries.c.receiver,
            behind.c.status == PENDING,
        )
        .scalar_subquery()
    )
    rows = connection.execute(
        matching(
            connection,
            filters,
            deliveries.c.receiver,
            outbox.c.event_id,
            outbox.c.aggregate_id,
            outbox.c.seq,
            outbox.c.event_type,
            deliveries.c.attempts,
            deliveries.c.last_error,
            deliveries.c.settled_at,
            waiting if status == DEAD else sa.literal(0),
            deliveries.c.reason,
            deliveries.c.settled_by,
            status=status,
        )
        .order_by(deliveries.c.receiver, deliveries.c.position)
        .limit(max(1, min(limit, MAX_PAGE)))
    )
    return [DeadLetter(*row) for row in rows]


def waivers(connection: Connection, filters: DeadFilter) -> list[DeadLetter]:
    """What the resolved filter would let through, had it not been waived; a page of it."""
    return dead_letters(connection, filters, MAX_PAGE, status=WAIVED)


def waive(connection: Connection, receiver: str, event: str, reason: str, by: str, now: int) -> Waiver:
    """Let a dead letter go at that receiver: the later events of its aggregate go on, and it is never delivered.

    `event` as in DeadFilter; `now` in UTC ms. Again with the same reason it is answered as the first time.
    Raises InvalidInput without a usable reason, NotFound, Conflict when it was waived for another reason, Refused
    when it is no dead letter.
    """
    reason = require_reason(reason)
    require_receiver(connection, receiver)
    # The drain of this receiver must not decide meanwhile what waits behind it.
    lock_receiver(connection, receiver)
    delivery = load_delivery(connection, receiver, find_event(connection, event))
    name, of_row = (
        delivery.event.event_id,
        (deliveries.c.receiver == receiver, deliveries.c.position == delivery.event.position),
    )
    if delivery.status == WAIVED:
        row = connection.execute(
            sa.select(deliveries.c.reason, deliveries.c.settled_by, deliveries.c.settled_at).where(*of_row)
        ).one()
        first = Waiver(receiver, name, delivery.event.aggregate_id, row[0], row[1], row[2], created=False)
        if first.reason != reason:
            raise Conflict(f"{first.sentence()}; nothing was changed")
        return first
    if delivery.status != DEAD:
        raise Refused(f"{name} cannot be waived at {receiver}: {_NOT_DEAD[delivery.status]}")
    by = storable(by, 100)
    connection.execute(
        sa.update(deliveries).where(*of_row).values(status=WAIVED, reason=reason, settled_by=by, settled_at=now)
    )
    return Waiver(receiver, name, delivery.event.aggregate_id, reason, by, now, created=True)


_NOT_DEAD = {
    PENDING: "it has not failed, and waits for its turn",
    RETRYING: "it is still being retried; it is delivered or becomes a dead letter by itself",
    DONE: "it was delivered",
}


def require_reason(reason: str, what: str = "the event may be left out") -> str:
    """The reason why `what`, as one line. Raises InvalidInput when there is none, or it is too long for a listing."""
    line = " ".join(reason.split())
    if not line:
        raise InvalidInput({"reason": f"must say why {what}"})
    if len(line) > MAX_REASON:
        raise InvalidInput({"reason": f"must have at most {MAX_REASON} characters"})
    if not line.isprintable():
        raise InvalidInput({"reason": "must not hold control or unprintable characters"})
    return line


def require_receiver(connection: Connection, receiver: str) -> None:
    """Raises NotFound, with the names that there are, for a receiver that was never registered."""
    known: Sequence[str] = registered_receivers(connection)
    if receiver not in known:
        raise NotFound(f"there is no receiver {receiver}; there are {', '.join(known) or 'none'}")


def _error() -> sa.ColumnElement[str]:
    return sa.func.coalesce(deliveries.c.last_error, sa.literal_column("''"), type_=sa.Text)

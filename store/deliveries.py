"""Deliveries: what each receiver has still to take, has taken, or could not take. The order rule lives here.

Non-terminal states and who reads them: `pending` the receiver's drain (`next_batch`), `retrying` the event's own run
(`load_delivery`, started by `claim_runs`), `dead` a person (`dead list`, redrive, waive).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.counts import counted
from contracts.errors import NotFound
from contracts.events import Event
from store.batch import EVENT, EventBatch
from store.dialect import MAX_ERROR, Rendered, at_most, by_index, for_update, pack, storable, value_list
from store.receivers import lock_receiver
from store.schema import deliveries, outbox

PENDING, RETRYING, DONE, DEAD, WAIVED = "pending", "retrying", "done", "dead", "waived"


@dataclass(frozen=True)
class Delivery:
    """One event at one receiver. `next_attempt_at`: UTC ms or None."""

    receiver: str
    event: Event
    status: str
    attempts: int
    next_attempt_at: int | None
    last_error: str | None


def _failing_before(of: sa.FromClause) -> sa.Exists:
    earlier = deliveries.alias("earlier")
    return (
        sa.select(sa.literal_column("1"))
        .select_from(earlier)
        .where(
            earlier.c.receiver == of.c.receiver,
            earlier.c.aggregate_id == of.c.aggregate_id,
            earlier.c.seq < of.c.seq,
            # Literals: a bound parameter would keep SQLite from using the partial index.
            sa.text("earlier.status IN ('retrying', 'dead')"),
        )
        .exists()
    )


def _unfinished_before(of: sa.FromClause) -> sa.Exists:
    earlier, event = deliveries.alias("earlier"), outbox.alias("earlier_event")
    return (
        sa.select(sa.literal_column("1"))
        .select_from(event.join(earlier, earlier.c.position == event.c.position))
        .where(
            event.c.aggregate_id == of.c.aggregate_id,
            event.c.seq < of.c.seq,
            earlier.c.receiver == of.c.receiver,
            sa.text("earlier.status IN ('pending', 'retrying', 'dead')"),
        )
        .exists()
    )


_TAKEABLE = (
    sa.select(deliveries.c.position)
    .where(
        deliveries.c.receiver == sa.bindparam("receiver"),
        sa.text("deliveries.status = 'pending'"),
        ~_failing_before(deliveries),
    )
    .order_by(deliveries.c.position)
)
# Left to itself SQLite walks the primary key, past all that the receiver has ever taken.
_NEXT = Rendered(lambda _: by_index(at_most(_TAKEABLE, "limit"), deliveries, "deliveries_pending"), "receiver", "limit")


def next_batch(connection: Connection, receiver: str, limit: int) -> EventBatch:
    """Pending events that the receiver may take now, in order: of each aggregate only what has nothing `retrying` or
    `dead` before it. Take `lock_receiver` first."""
    return EventBatch(connection, [row[0] for row in _NEXT.many(connection, receiver, limit)])


_PROBES = (
    sa.select(deliveries.c.position)
    .where(
        deliveries.c.receiver == sa.bindparam("receiver"),
        sa.text("deliveries.status = 'pending'"),
        deliveries.c.position > sa.bindparam("after"),
        ~_unfinished_before(deliveries),
    )
    .order_by(deliveries.c.position)
    .limit(1)
)


def next_probe(connection: Connection, receiver: str, after: int) -> EventBatch:
    """The next event at a position above `after` that is the first unfinished one of its aggregate, from the beginning
    again after the last; empty when nothing may be taken."""
    for start in (after, 0) if after else (0,):
        position = connection.execute(_PROBES, {"receiver": receiver, "after": start}).scalar_one_or_none()
        if position is not None:
            return EventBatch(connection, [position])
    return EventBatch(connection, [])


def first_next(connection: Connection, receiver: str) -> int | None:
    """Position of the first event that the receiver may take now, or None."""
    batch = next_batch(connection, receiver, 1)
    return batch.positions[0] if batch else None


def _mark_done(connection: Connection) -> Any:
    chosen = value_list(connection, "positions", int)
    return (
        sa.update(deliveries)
        .where(
            deliveries.c.receiver == sa.bindparam("of"),
            deliveries.c.position.in_(sa.select(chosen.c.value)),
            sa.text("deliveries.status IN ('pending', 'retrying')"),
        )
        .values(status=sa.literal_column("'done'"), next_attempt_at=sa.null(), has_run=sa.literal_column("0"))
    )


_MARK_DONE = Rendered(_mark_done, "of", "positions")


def mark_done(connection: Connection, receiver: str, positions: Sequence[int]) -> None:
    """The receiver took these; called in the transaction of their effects.

    Raises RuntimeError when one was done already: its effect would be there twice, so the transaction must not commit.
    """
    count = _MARK_DONE.count(connection, receiver, pack(connection, positions))
    if count != len(positions):
        raise RuntimeError(f"a twin took {counted(len(positions) - count, 'delivery', 'deliveries')} of {receiver}")


_RECORD_FAILURE = (
    sa.update(deliveries)
    .where(
        deliveries.c.receiver == sa.bindparam("of"),
        deliveries.c.position == sa.bindparam("at"),
        deliveries.c.status.in_([PENDING, RETRYING]),
    )
    .values(
        status=sa.bindparam("becomes"),
        attempts=sa.bindparam("attempts"),
        last_error=sa.bindparam("error"),
        next_attempt_at=sa.bindparam("due"),
        settled_at=sa.bindparam("settled"),
        has_run=sa.case((sa.bindparam("becomes") == DEAD, 0), else_=deliveries.c.has_run),
    )
)


def record_failure(
    connection: Connection,
    receiver: str,
    position: int,
    *,
    attempts: int,
    error: str,
    next_attempt_at: int | None,
    now: int,
) -> None:
    """An attempt failed: the `attempts`th in all. `next_attempt_at` (UTC ms) None makes it a dead letter.

    The caller has rolled the receiver's effect back to a savepoint.
    """
    dead = next_attempt_at is None
    connection.execute(
        _RECORD_FAILURE,
        {
            "of": receiver,
            "at": position,
            "becomes": DEAD if dead else RETRYING,
            "attempts": attempts,
            "error": storable(error, MAX_ERROR),
            "due": next_attempt_at,
            "settled": now if dead else None,
        },
    )


def postpone_attempt(connection: Connection, receiver: str, position: int, next_attempt_at: int, error: str) -> None:
    """The receiver was unavailable: a `retrying` delivery waits until `next_attempt_at` (UTC ms); nothing is spent."""
    connection.execute(
        sa.update(deliveries)
        .where(
            deliveries.c.receiver == receiver,
            deliveries.c.position == position,
            deliveries.c.status == RETRYING,
        )
        .values(next_attempt_at=next_attempt_at, last_error=error)
    )


def load_delivery(connection: Connection, receiver: str, event_id: str) -> Delivery:
    """The delivery, locked until the transaction ends. Raises NotFound."""
    row = connection.execute(
        for_update(
            connection,
            sa.select(
                *EVENT,
                deliveries.c.status,
                deliveries.c.attempts,
                deliveries.c.next_attempt_at,
                deliveries.c.last_error,
            )
            .select_from(deliveries.join(outbox, outbox.c.position == deliveries.c.position))
            .where(deliveries.c.receiver == receiver, outbox.c.event_id == event_id),
            of=deliveries,  # the relay must not wait for a slow receiver
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no delivery of {event_id} to {receiver}; see `event show {event_id}`")
    return Delivery(receiver, Event(*row[:6]), *row[6:])


def waits_behind(connection: Connection, receiver: str, event: Event) -> str | None:
    """The event id of the earliest unfinished event of the same aggregate before this one, or None."""
    return connection.execute(
        sa.select(outbox.c.event_id)
        .join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
        .where(
            deliveries.c.receiver == receiver,
            outbox.c.aggregate_id == event.aggregate_id,
            outbox.c.seq < event.seq,
            deliveries.c.status.in_([PENDING, RETRYING, DEAD]),
        )
        .order_by(outbox.c.seq)
        .limit(1)
    ).scalar_one_or_none()


def deliveries_of(connection: Connection, event_id: str) -> list[Delivery]:
    """All deliveries of one event, by receiver."""
    rows = connection.execute(
        sa.select(
            deliveries.c.receiver,
            *EVENT,
            deliveries.c.status,
            deliveries.c.attempts,
            deliveries.c.next_attempt_at,
            deliveries.c.last_error,
        )
        .select_from(deliveries.join(outbox, outbox.c.position == deliveries.c.position))
        .where(outbox.c.event_id == event_id)
        .order_by(deliveries.c.receiver)
    )
    return [Delivery(row[0], Event(*row[1:7]), *row[7:]) for row in rows]


@dataclass(frozen=True)
class Retrying:
    """A receiver's `retrying` deliveries: when (UTC ms) the first that has no run is due, how many have one, and when
    the first of these is due, or was claimed."""

    without_run: int | None
    open_runs: int
    with_run: int | None

    def next_due(self, most_open: int) -> int | None:
        """When (UTC ms) the next run is to be started; None where nothing waits for one, or there is no room."""
        return self.without_run if self.open_runs < most_open else None

    def want_runs(self, most_open: int, now: int, overdue: int) -> bool:
        """Whether `claim_runs` with these arguments would find something, without a write transaction."""
        due = self.next_due(most_open)
        return (due is not None and due <= now) or (self.with_run is not None and self.with_run < overdue)


_BY_RUN = by_index(
    sa.select(deliveries.c.has_run, sa.func.count(), sa.func.min(deliveries.c.next_attempt_at))
    .where(deliveries.c.receiver == sa.bindparam("receiver"), sa.text("deliveries.status = 'retrying'"))
    .group_by(deliveries.c.has_run),
    deliveries,
    "deliveries_due",
)


def retrying_of(connection: Connection, receiver: str) -> Retrying:
    """The receiver's `retrying` deliveries."""
    found = {row[0]: (row[1], row[2]) for row in connection.execute(_BY_RUN, {"receiver": receiver})}
    _, without_run = found.get(0, (0, None))
    return Retrying(without_run, *found.get(1, (0, None)))


_RETRYING = (deliveries.c.receiver == sa.bindparam("receiver"), sa.text("deliveries.status = 'retrying'"))
_OPEN_RUNS = by_index(
    sa.select(sa.func.count(), sa.func.min(deliveries.c.next_attempt_at)).where(*_RETRYING, deliveries.c.has_run == 1),
    deliveries,
    "deliveries_due",
)
_LOST_RUNS = (
    sa.select(deliveries.c.position)
    .where(*_RETRYING, deliveries.c.has_run == 1, deliveries.c.next_attempt_at < sa.bindparam("overdue"))
    .order_by(deliveries.c.next_attempt_at)
    .limit(sa.bindparam("limit"))
)
_WITHOUT_RUN = (
    sa.select(deliveries.c.position)
    .where(*_RETRYING, deliveries.c.has_run == 0, deliveries.c.next_attempt_at <= sa.bindparam("now"))
    .order_by(deliveries.c.next_attempt_at)
    .limit(sa.bindparam("limit"))
)


def claim_runs(
    connection: Connection, receiver: str, most_open: int, *, now: int, overdue: int
) -> list[tuple[str, str]]:
    """(event id, aggregate id) of the `retrying` deliveries that are due at `now` and have no run, oldest due first:
    it is to be started.

    At most `most_open` have one at a time. A claimed one counts as due from its claim on: it may have waited long for
    its place, and would seem to have lost its run at once. One that was claimed before `overdue` (both UTC ms) and
    still waits has lost it, and is named again. Starting a run that exists is harmless.
    """
    lock_receiver(connection, receiver)  # two that count at once would both find room
    of_receiver = {"receiver": receiver}
    running, oldest = connection.execute(_OPEN_RUNS, of_receiver).one()
    lost: list[int] = []
    if oldest is not None and oldest < overdue:
        parameters = {**of_receiver, "overdue": overdue, "limit": most_open}
        lost = list(connection.execute(_LOST_RUNS, parameters).scalars())
    new: list[int] = []
    if running < most_open:
        parameters = {**of_receiver, "now": now, "limit": most_open - running}
        new = list(connection.execute(_WITHOUT_RUN, parameters).scalars())
    if not new and not lost:
        return []
    chosen = (deliveries.c.receiver == receiver, deliveries.c.position.in_(new + lost))
    found = connection.execute(
        sa.select(outbox.c.event_id, outbox.c.aggregate_id)
        .join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
        .where(*chosen)
        .order_by(deliveries.c.next_attempt_at, deliveries.c.position)
    ).all()
    connection.execute(sa.update(deliveries).where(*chosen).values(has_run=1, next_attempt_at=now))
    return [(row[0], row[1]) for row in found]


def forget_runs(connection: Connection) -> None:
    """Temporal lost its runs: every `retrying` delivery gets a new one by `claim_runs`, when it is due."""
    connection.execute(
        sa.update(deliveries).where(sa.text("status = 'retrying'"), deliveries.c.has_run == 1).values(has_run=0)
    )

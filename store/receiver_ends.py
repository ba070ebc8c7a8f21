"""Ending a receiver for good: it takes no event any more, and what it has not taken is waived, on record.

In three steps, so that nobody waits for long: it is recorded (`begin_end`), open deliveries are waived a chunk at a
time (`waive_chunk`), and the last few together with the subscription's end (`finish_end`). Whoever dies in between
leaves a receiver that is being ended; the same call again goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, Refused
from store.clock import iso
from store.dead_letters import require_reason, require_receiver
from store.deliveries import DEAD, PENDING, RETRYING, WAIVED
from store.dialect import by_index, insert, lock_tables, pack, storable, value_list
from store.faults import clear_fault
from store.outbox import NOT_FANNED_OUT
from store.receivers import has_ended, lock_receiver, release_receiver
from store.schema import deliveries, ended_subscriptions, outbox, receiver_ends, receivers, subscriptions

# Literals and their partial index each: bound, SQLite would walk over all that the receiver has ever taken.
_OPEN = (
    ("deliveries.status = 'pending'", "deliveries_pending"),
    ("deliveries.status = 'retrying'", "deliveries_due"),
    ("deliveries.status IN ('dead', 'waived') AND deliveries.status = 'dead'", "deliveries_set_aside"),
)


@dataclass(frozen=True)
class ReceiverEnd:
    """That a receiver was ended, or is being ended while `ended_at` is None. Times: UTC ms."""

    receiver: str
    number: int
    reason: str
    by: str
    begun_at: int
    ended_at: int | None

    def sentence(self) -> str:
        """Who ended it, when and why."""
        if self.ended_at is None:
            return f"{self.receiver} is being ended by {self.by} since {iso(self.begun_at)}: {self.reason}"
        return f"{self.receiver} was ended by {self.by} at {iso(self.ended_at)}: {self.reason}"


def read_end(connection: Connection, receiver: str) -> ReceiverEnd | None:
    """How the receiver was ended, or is being ended; None for one that takes events, also if it was ended once."""
    last = connection.execute(
        sa.select(
            receiver_ends.c.receiver,
            receiver_ends.c.number,
            receiver_ends.c.reason,
            receiver_ends.c.ended_by,
            receiver_ends.c.begun_at,
            receiver_ends.c.ended_at,
        )
        .where(receiver_ends.c.receiver == receiver)
        .order_by(receiver_ends.c.number.desc())
        .limit(1)
    ).one_or_none()
    if last is None:
        return None
    end = ReceiverEnd(*last)
    if end.ended_at is None:
        return end
    ended = connection.execute(sa.select(has_ended()).where(receivers.c.receiver == receiver)).scalar_one()
    return end if ended else None


def begin_end(connection: Connection, receiver: str, reason: str, by: str, now: int) -> tuple[ReceiverEnd, bool]:
    """Record that the receiver is to end, and whether that is new; `now` in UTC ms. It still takes events.

    Again with the same reason, it is answered with the first. Raises InvalidInput without a usable reason, NotFound,
    Conflict when it was ended for another reason.
    """
    reason = require_reason(reason, "the receiver is ended")
    require_receiver(connection, receiver)
    lock_receiver(connection, receiver)
    end = read_end(connection, receiver)
    if end is not None:
        if end.reason != reason:
            raise Conflict(f"{end.sentence()}; nothing was changed")
        return end, False
    count = sa.select(sa.func.count()).where(receiver_ends.c.receiver == receiver)
    end = ReceiverEnd(receiver, connection.execute(count).scalar_one() + 1, reason, storable(by, 100), now, None)
    connection.execute(
        sa.insert(receiver_ends).values(
            receiver=receiver, number=end.number, reason=reason, ended_by=end.by, begun_at=now
        )
    )
    return end, True


def waive_chunk(connection: Connection, receiver: str, now: int, limit: int) -> int:
    """Waive what the receiver has not taken, at most `limit` of each kind: how many there were. Fewer than `limit`
    means that no more is left for now. Raises Refused when the receiver was registered again meanwhile."""
    lock_receiver(connection, receiver)
    end = _require_end(connection, receiver)
    return _waive(connection, end, now, limit) if end.ended_at is None else 0  # a twin was quicker


def finish_end(connection: Connection, receiver: str, now: int, limit: int) -> ReceiverEnd | None:
    """End the subscription, together with the last that it has not taken; None when those are `limit` or more, which
    are waived then. Already ended, it is answered as the first time. Raises Refused as `waive_chunk`."""
    lock_receiver(connection, receiver)
    end = _require_end(connection, receiver)
    if end.ended_at is not None:
        return end
    # An event that is on its way into the outbox may have a lower position than the last one that we see, and one that
    # is being fanned out a delivery that we do not see.
    lock_tables(connection, deliveries, outbox)
    if _waive(connection, end, now, limit) >= limit:
        return None
    last = connection.execute(sa.select(sa.func.coalesce(sa.func.max(outbox.c.position), 0))).scalar_one()
    ended = insert(connection, ended_subscriptions).from_select(
        ["receiver", "event_type", "since_position", "until_position"],
        sa.select(
            subscriptions.c.receiver,
            subscriptions.c.event_type,
            subscriptions.c.since_position,
            sa.literal(last, sa.BigInteger),
        ).where(subscriptions.c.receiver == receiver),
    )
    # Where it was ended, registered again and ended once more before anything happened, the period is one.
    connection.execute(
        ended.on_conflict_do_update(
            index_elements=["receiver", "event_type", "since_position"],
            set_={"until_position": ended.excluded.until_position},
        )
    )
    connection.execute(sa.delete(subscriptions).where(subscriptions.c.receiver == receiver))
    release_receiver(connection, receiver)
    clear_fault(connection, receiver)
    connection.execute(
        sa.update(receiver_ends)
        .where(receiver_ends.c.receiver == receiver, receiver_ends.c.number == end.number)
        .values(ended_at=now)
    )
    return read_end(connection, receiver)


def _require_end(connection: Connection, receiver: str) -> ReceiverEnd:
    end = read_end(connection, receiver)
    if end is None:
        raise Refused(f"{receiver} was registered again meanwhile, and goes on; take it out of the registry first")
    return end


def _waive(connection: Connection, end: ReceiverEnd, now: int, limit: int) -> int:
    waived: dict[str, Any] = {
        "status": WAIVED,
        "next_attempt_at": None,
        "has_run": 0,
        "reason": f"receiver ended: {end.reason}",
        "settled_by": end.by,
        "settled_at": now,
    }
    most = 0
    for condition in NOT_FANNED_OUT:
        found = _without_delivery(connection, end.receiver, condition, limit)
        most = max(most, len(found))
        if found:
            _add_waived(connection, end.receiver, found, waived)
    chosen = value_list(connection, "positions", int)
    for condition, index in _OPEN:
        positions = list(
            connection.execute(
                by_index(
                    sa.select(deliveries.c.position)
                    .where(deliveries.c.receiver == end.receiver, sa.text(condition))
                    .order_by(deliveries.c.position)
                    .limit(limit),
                    deliveries,
                    index,
                )
            ).scalars()
        )
        most = max(most, len(positions))
        if positions:
            connection.execute(
                sa.update(deliveries)
                .where(
                    deliveries.c.receiver == end.receiver,
                    deliveries.c.position.in_(sa.select(chosen.c.value)),
                    deliveries.c.status.in_([PENDING, RETRYING, DEAD]),
                )
                .values(**waived),
                {"positions": pack(connection, positions)},
            )
    return most


def _without_delivery(connection: Connection, receiver: str, condition: str, limit: int) -> list[int]:
    """Positions of events on their way to this receiver that have no delivery yet."""
    delivery = sa.exists().where(deliveries.c.receiver == receiver, deliveries.c.position == outbox.c.position)
    return list(
        connection.execute(
            sa.select(outbox.c.position)
            .join(subscriptions, subscriptions.c.event_type == outbox.c.event_type)
            .where(
                sa.text(condition),
                subscriptions.c.receiver == receiver,
                # `+ 0`: SQLite would take it for a reason to read the whole table, instead of the partial index.
                outbox.c.position + 0 > subscriptions.c.since_position,
                ~delivery,
            )
            .order_by(outbox.c.position)
            .limit(limit)
        ).scalars()
    )


def _add_waived(connection: Connection, receiver: str, positions: Sequence[int], waived: dict[str, Any]) -> None:
    chosen = value_list(connection, "positions", int)
    names = ["receiver", "position", "aggregate_id", "seq", *waived]
    connection.execute(
        insert(connection, deliveries)
        .from_select(
            names,
            sa.select(
                sa.literal(receiver),
                outbox.c.position,
                outbox.c.aggregate_id,
                outbox.c.seq,
                *(sa.literal(value, deliveries.c[name].type).label(name) for name, value in waived.items()),
            )
            .join_from(chosen, outbox, outbox.c.position == chosen.c.value)
            .order_by(outbox.c.position),
        )
        # The fan-out may be adding the same ones; those are found by their state then.
        .on_conflict_do_nothing(),
        {"positions": pack(connection, positions)},
    )

"""I4: a receiver sees the events of one aggregate in `seq` order.

When something was taken is not on record, and need not be: a receiver that keeps the order never has one event done
while an earlier one is unfinished or unregistered. So it is enough to look behind what is unfinished, which is little.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from store.audit_findings import UNFINISHED, Audit, Check, taken, without_delivery
from store.deliveries import DONE, WAIVED
from store.schema import deliveries, outbox


def _later(receiver: sa.ColumnElement[str], state: str = "") -> sa.Exists:
    """Whether the receiver has a delivery (in that state) of a later event of the same aggregate."""
    event, of = outbox.alias("later"), deliveries.alias()
    return (
        sa.exists()
        .select_from(event.join(of, of.c.position == event.c.position))
        .where(
            event.c.aggregate_id == outbox.c.aggregate_id,
            event.c.seq > outbox.c.seq,
            of.c.receiver == receiver,
            *([of.c.status == state] if state else []),
        )
    )


def _recorded() -> Check:
    event, before = outbox.alias("event"), outbox.alias("before")
    predecessor = (
        sa.exists()
        .select_from(before)
        .where(
            before.c.aggregate_id == event.c.aggregate_id,
            before.c.seq == event.c.seq - 1,
            before.c.position < event.c.position,
        )
    )
    return Check(
        "I4",
        "events without the one before them in their aggregate, or recorded before it",
        sa.select(event.c.event_id).where(event.c.seq > 1, ~predecessor),
    )


def _unfinished(condition: str) -> sa.Select[Any]:
    of_events = sa.select(outbox.c.event_id).join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
    return of_events.where(sa.text(condition))


# Made once: making them anew takes longer than running them.
_CHECKS = (
    _recorded(),
    *(
        Check(
            "I4",
            f"deliveries {state} under another aggregate or number than their event's",
            _unfinished(condition).where(
                sa.or_(deliveries.c.aggregate_id != outbox.c.aggregate_id, deliveries.c.seq != outbox.c.seq)
            ),
        )
        for state, condition in UNFINISHED.items()
    ),
    *(
        Check(
            "I4",
            f"events {state} at a receiver that took a later one of their aggregate",
            _unfinished(condition).where(_later(deliveries.c.receiver, DONE)),
        )
        for state, condition in UNFINISHED.items()
        if state != WAIVED
    ),
    *(
        Check(
            "I4",
            "events without a delivery at a receiver that has a later one of their aggregate",
            unregistered.where(_later(taken.c.receiver)),
        )
        for unregistered in without_delivery(outbox.c.event_id)
    ),
)


def check_sequence(connection: Connection, found: Audit) -> None:
    """Note what does not hold in `found`."""
    found.look_for(connection, *_CHECKS)

"""What a person asks: how many, in which state, how old. Each function reads within the caller's snapshot."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.receivers import has_ended
from store.schema import (
    billing_entries,
    deliveries,
    invalid_entries,
    mail_messages,
    orders,
    outbox,
    receivers,
    sales_totals,
)

STATES = (PENDING, RETRYING, DONE, DEAD, WAIVED)


@dataclass(frozen=True)
class ReceiverStatus:
    """Deliveries of one receiver by state; `held_since`, `last_progress`: UTC ms or None."""

    receiver: str
    counts: dict[str, int]
    held_since: int | None
    reason: str | None
    last_progress: int | None


@dataclass(frozen=True)
class OutboxStatus:
    """Events that wait for the relay, that are in Redis, and that have their deliveries."""

    pending: int
    in_flight: int
    fanned_out: int

    @property
    def total(self) -> int:
        """All events."""
        return self.pending + self.in_flight + self.fanned_out


def count_orders(connection: Connection) -> int:
    """How many orders there are."""
    return connection.execute(sa.select(sa.func.count()).select_from(orders)).scalar_one()


def outbox_status(connection: Connection) -> OutboxStatus:
    """The outbox by state; an event that is published again counts as pending."""
    count = sa.func.count()
    pending = sa.text("status = 'PENDING'")
    in_flight = sa.text("status = 'PUBLISHED' AND fanned_out_at IS NULL")
    total = connection.execute(sa.select(count).select_from(outbox)).scalar_one()
    waiting = connection.execute(sa.select(count).select_from(outbox).where(pending)).scalar_one()
    pushed = connection.execute(sa.select(count).select_from(outbox).where(in_flight)).scalar_one()
    return OutboxStatus(waiting, pushed, total - waiting - pushed)


def count_deliveries(connection: Connection, receiver: str) -> dict[str, int]:
    """State -> how many deliveries of the receiver are in it."""
    rows = connection.execute(
        sa.select(deliveries.c.status, sa.func.count())
        .where(deliveries.c.receiver == receiver)
        .group_by(deliveries.c.status)
    )
    found = {row[0]: row[1] for row in rows}
    return {state: found.get(state, 0) for state in STATES}


def receiver_status(connection: Connection) -> list[ReceiverStatus]:
    """Every receiver that was registered and not ended, by name."""
    counts: dict[str, dict[str, int]] = {}
    for receiver, status, number in connection.execute(
        sa.select(deliveries.c.receiver, deliveries.c.status, sa.func.count()).group_by(
            deliveries.c.receiver, deliveries.c.status
        )
    ):
        counts.setdefault(receiver, {})[status] = number
    rows = connection.execute(
        sa.select(
            receivers.c.receiver,
            receivers.c.held_since,
            receivers.c.reason,
            receivers.c.last_progress,
        )
        .where(~has_ended())
        .order_by(receivers.c.receiver)
    )
    return [
        ReceiverStatus(
            row[0],
            {state: counts.get(row[0], {}).get(state, 0) for state in STATES},
            row[1],
            row[2],
            row[3],
        )
        for row in rows
    ]


def sales_by_currency(connection: Connection, generation: str) -> dict[str, tuple[int, int]]:
    """Currency -> (orders, amount in minor units) of one generation."""
    rows = connection.execute(
        sa.select(sales_totals.c.currency, sales_totals.c.orders, sales_totals.c.amount)
        .where(sales_totals.c.generation == generation)
        .order_by(sales_totals.c.currency)
    )
    return {row[0]: (row[1], row[2]) for row in rows}


def effect_counts(connection: Connection) -> dict[str, int]:
    """Rows that the built-in receivers `billing` and `mail` wrote."""
    return {
        name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        for name, table in (("billing", billing_entries), ("mail", mail_messages))
    }


def count_invalid(connection: Connection) -> int:
    """Entries of the Redis list that were no events."""
    return connection.execute(sa.select(sa.func.count()).select_from(invalid_entries)).scalar_one()


def list_invalid(connection: Connection, limit: int) -> list[tuple[str, str, int]]:
    """(entry, reason, seen at in UTC ms) of entries that were no events, the newest first, at most `limit`."""
    rows = connection.execute(
        sa.select(invalid_entries.c.entry, invalid_entries.c.reason, invalid_entries.c.seen_at)
        .order_by(invalid_entries.c.seen_at.desc(), invalid_entries.c.entry)
        .limit(limit)
    )
    return [(row[0], row[1], row[2]) for row in rows]

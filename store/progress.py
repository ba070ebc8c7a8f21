"""How far chosen events got: on their way, at each receiver, and in what the built-in receivers wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from store.control import read_control
from store.dialect import pack, value_list
from store.schema import PENDING, billing_entries, deliveries, mail_messages, outbox, sales_applied, subscriptions


@dataclass(frozen=True)
class Progress:
    """Of some events: how many wait for the relay, how many are in Redis, and receiver -> state -> deliveries."""

    unsent: int
    in_flight: int
    deliveries: dict[str, dict[str, int]]

    def count(self, receiver: str, state: str) -> int:
        """Deliveries of the receiver in that state."""
        return self.deliveries.get(receiver, {}).get(state, 0)


def takers(connection: Connection, event_type: str) -> list[str]:
    """Names of the receivers that take the type, sorted."""
    return list(
        connection.execute(
            sa.select(subscriptions.c.receiver)
            .where(subscriptions.c.event_type == event_type)
            .order_by(subscriptions.c.receiver)
        ).scalars()
    )


def progress_of(connection: Connection, event_ids: Sequence[str]) -> Progress:
    """Where these events stand."""
    chosen = value_list(connection, "ids", str)
    bound = {"ids": pack(connection, event_ids)}
    events = outbox.join(chosen, outbox.c.event_id == chosen.c.value)
    unsent = in_flight = 0
    for status, fanned_out, number in connection.execute(
        sa.select(outbox.c.status, outbox.c.fanned_out_at.is_not(None), sa.func.count())
        .select_from(events)
        .group_by(outbox.c.status, outbox.c.fanned_out_at.is_not(None)),
        bound,
    ):
        if status == PENDING:
            unsent += number
        elif not fanned_out:
            in_flight += number
    states: dict[str, dict[str, int]] = {}
    for receiver, status, number in connection.execute(
        sa.select(deliveries.c.receiver, deliveries.c.status, sa.func.count())
        .select_from(events.join(deliveries, deliveries.c.position == outbox.c.position))
        .group_by(deliveries.c.receiver, deliveries.c.status),
        bound,
    ):
        states.setdefault(receiver, {})[status] = number
    return Progress(unsent, in_flight, states)


def effects_of(connection: Connection, event_ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Built-in receiver -> (rows that it wrote for these events, sum of their amounts; None where there is none)."""
    chosen = value_list(connection, "ids", str)
    bound = {"ids": pack(connection, event_ids)}
    events = outbox.join(chosen, outbox.c.event_id == chosen.c.value)
    count = sa.func.count()
    billed = connection.execute(
        sa.select(count, sa.func.coalesce(sa.func.sum(billing_entries.c.amount), 0)).select_from(
            events.join(billing_entries, billing_entries.c.position == outbox.c.position)
        ),
        bound,
    ).one()
    mailed = connection.execute(
        sa.select(count).select_from(events.join(mail_messages, mail_messages.c.position == outbox.c.position)), bound
    ).scalar_one()
    sold = connection.execute(
        sa.select(count, sa.func.coalesce(sa.func.sum(sales_applied.c.amount), 0))
        .select_from(events.join(sales_applied, sales_applied.c.position == outbox.c.position))
        .where(sales_applied.c.generation == read_control(connection).active_generation),
        bound,
    ).one()
    return {"billing": (billed[0], int(billed[1])), "mail": (mailed, None), "sales": (sold[0], int(sold[1]))}

"""Effects of the built-in receivers, each at most once for an event: the event's position is the key."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import Event
from store.control import read_control
from store.dialect import for_update, insert, pack, value_list
from store.schema import billing_entries, generations, mail_messages, sales_applied, sales_totals


def write_billing_entries(connection: Connection, events: Sequence[Event]) -> None:
    """One entry an order, with its amount."""
    connection.execute(
        insert(connection, billing_entries).on_conflict_do_nothing(),
        [
            {
                "position": event.position,
                "order_id": event.payload["order_id"],
                "amount": event.payload["amount"],
                "currency": event.payload["currency"],
            }
            for event in events
        ],
    )


def write_mail_messages(connection: Connection, events: Sequence[Event]) -> None:
    """One confirmation an order."""
    connection.execute(
        insert(connection, mail_messages).on_conflict_do_nothing(),
        [
            {
                "position": event.position,
                "order_id": event.payload["order_id"],
                "subject": f"We received your order {event.payload['order_id']}",
            }
            for event in events
        ],
    )


def apply_sales(connection: Connection, events: Sequence[Event]) -> None:
    """Add the amounts to the active generation, once an event; an event that it holds already adds nothing."""
    generation = _lock_active_generation(connection)
    chosen = value_list(connection, "positions", int)
    present = set(
        connection.execute(
            sa.select(sales_applied.c.position).where(
                sales_applied.c.generation == generation,
                sales_applied.c.position.in_(sa.select(chosen.c.value)),
            ),
            {"positions": pack(connection, [event.position for event in events])},
        ).scalars()
    )
    fresh = [event for event in events if event.position not in present]
    if not fresh:
        return
    connection.execute(
        sa.insert(sales_applied),
        [
            {
                "generation": generation,
                "position": event.position,
                "amount": event.payload["amount"],
                "currency": event.payload["currency"],
            }
            for event in fresh
        ],
    )
    sums: dict[str, tuple[int, int]] = {}
    for event in fresh:
        count, amount = sums.get(event.payload["currency"], (0, 0))
        sums[event.payload["currency"]] = (count + 1, amount + event.payload["amount"])
    statement = insert(connection, sales_totals)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["generation", "currency"],
            set_={
                "orders": sales_totals.c.orders + statement.excluded.orders,
                "amount": sales_totals.c.amount + statement.excluded.amount,
            },
        ),
        [
            {"generation": generation, "currency": currency, "orders": count, "amount": amount}
            for currency, (count, amount) in sorted(sums.items())
        ],
    )


def _lock_active_generation(connection: Connection) -> str:
    """The active generation, which stays active until this transaction ends: a write that an activation overtook would
    be left in a retired one."""
    while True:
        generation = read_control(connection).active_generation
        statement = sa.select(generations.c.state).where(generations.c.generation == generation)
        if connection.execute(for_update(connection, statement, shared=True)).scalar_one() == "ACTIVE":
            return generation

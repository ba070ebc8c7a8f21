"""Effects of the built-in receivers, each at most once for an event: the event's position is the key."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED, Event
from store.batch import positions_of
from store.control import read_control
from store.dialect import Rendered, for_update, insert, json_integer, json_text, pack, value_list
from store.schema import billing_entries, generations, mail_messages, outbox, sales_applied, sales_totals


def _insert_from_outbox(connection: Connection, table: sa.Table, **columns: Any) -> Any:
    """A row an event, out of its payload, in one statement; an event that has its row keeps it."""
    return (
        insert(connection, table)
        .from_select(
            ["position", *columns], sa.select(outbox.c.position, *columns.values()).where(_is_chosen(connection))
        )
        .on_conflict_do_nothing()
    )


def _is_chosen(connection: Connection) -> sa.ColumnElement[bool]:
    return outbox.c.position.in_(sa.select(value_list(connection, "positions", int).c.value))


def _billing_entries(connection: Connection) -> Any:
    return _insert_from_outbox(
        connection,
        billing_entries,
        order_id=json_text(connection, outbox.c.payload, "order_id"),
        amount=json_integer(connection, outbox.c.payload, "amount"),
        currency=json_text(connection, outbox.c.payload, "currency"),
    )


_BILLING_ENTRIES = Rendered(_billing_entries, "positions")


def write_billing_entries(connection: Connection, events: Sequence[Event]) -> None:
    """One entry an order, with its amount."""
    if events:
        _BILLING_ENTRIES.count(connection, pack(connection, positions_of(events)))


def _mail_messages(connection: Connection) -> Any:
    order_id = json_text(connection, outbox.c.payload, "order_id")
    subject = sa.literal_column("'We received your order '", sa.Text) + order_id
    return _insert_from_outbox(connection, mail_messages, order_id=order_id, subject=subject)


_MAIL_MESSAGES = Rendered(_mail_messages, "positions")


def write_mail_messages(connection: Connection, events: Sequence[Event]) -> None:
    """One confirmation an order."""
    if events:
        _MAIL_MESSAGES.count(connection, pack(connection, positions_of(events)))


def _apply_chosen(connection: Connection) -> Any:
    generation = sa.bindparam("of", type_=sa.Text)
    return apply_from_outbox(connection, generation, _is_chosen(connection)).returning(
        sales_applied.c.currency, sales_applied.c.amount
    )


_APPLY_CHOSEN = Rendered(_apply_chosen, "of", "positions")


def apply_sales(connection: Connection, events: Sequence[Event]) -> None:
    """Add the amounts to the active generation, once an event; an event that it holds already adds nothing.

    The generation's row is locked against an activation, which would leave the write in a retired generation.
    """
    if not events:
        return
    generation = _lock_active_generation(connection)
    fresh = _APPLY_CHOSEN.rows(connection, generation, pack(connection, positions_of(events)))
    sums: dict[str, tuple[int, int]] = {}
    for currency, amount in fresh:
        count, total = sums.get(currency, (0, 0))
        sums[currency] = (count + 1, total + amount)
    for currency, (count, total) in sorted(sums.items()):
        add_to_totals(connection, generation, currency, count, total)


def apply_from_outbox(connection: Connection, generation: sa.ColumnElement[str], which: sa.ColumnElement[bool]) -> Any:
    """The statement that puts `order-placed` events of the outbox into a generation, except those that it holds.

    The same one live and in a rebuild, so that the two cannot come to differ.
    """
    return (
        insert(connection, sales_applied)
        .from_select(
            ["generation", "position", "amount", "currency"],
            sa.select(
                generation,
                outbox.c.position,
                json_integer(connection, outbox.c.payload, "amount"),
                json_text(connection, outbox.c.payload, "currency"),
            ).where(which, outbox.c.event_type == sa.literal_column(f"'{ORDER_PLACED}'")),
        )
        .on_conflict_do_nothing()
    )


def _add(connection: Connection) -> Any:
    statement = insert(connection, sales_totals)
    return statement.on_conflict_do_update(
        index_elements=["generation", "currency"],
        set_={
            "orders": sales_totals.c.orders + statement.excluded.orders,
            "amount": sales_totals.c.amount + statement.excluded.amount,
        },
    )


_ADD = Rendered(_add, "generation", "currency", "orders", "amount")


def add_to_totals(connection: Connection, generation: str, currency: str, orders: int, amount: int) -> None:
    """Count `orders` more, `amount` (minor units) in all, into a generation's totals."""
    _ADD.count(connection, generation, currency, orders, amount)


def _locked_state(connection: Connection) -> Any:
    return for_update(
        connection,
        sa.select(generations.c.state).where(generations.c.generation == sa.bindparam("of")),
        shared=True,
    )


_LOCKED_STATE = Rendered(_locked_state, "of")


def _lock_active_generation(connection: Connection) -> str:
    """The active generation, which stays active until this transaction ends: a write that an activation overtook would
    be left in a retired one."""
    while True:
        generation = read_control(connection).active_generation
        ((state,),) = _LOCKED_STATE.rows(connection, generation)
        if state == "ACTIVE":
            return generation
        # An activation committed between the two reads, or while we waited for the lock.
        if read_control(connection).active_generation == generation:
            raise RuntimeError(f"generation {generation} is named as the active one and is {state}")

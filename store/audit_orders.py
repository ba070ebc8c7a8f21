"""I1: each order has its event, which says the same, and nothing is told of an order that there is not."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.identifiers import order_placed_id
from store.audit_findings import Audit, ByCurrency, Check, business_key, read_sums
from store.dialect import json_integer, json_quoted, json_text
from store.schema import orders, outbox

_PLACED = outbox.c.event_id == orders.c.id + ":placed"


def check_orders(connection: Connection, found: Audit, events: int) -> ByCurrency:
    """Note what does not hold in `found`; the sums of the orders that have their event. `events`: how many events
    there are of the type `order-placed`."""
    found.orders = connection.execute(sa.select(sa.func.count()).select_from(orders)).scalar_one()
    # One reading of both sides: who compares them also adds them up.
    sums, (told, equal) = read_sums(
        connection,
        lambda *columns: sa.select(*columns).join_from(orders, outbox, _PLACED),
        orders.c.currency,
        orders.c.amount,
        outbox.c.position,
        sa.func.count(),
        sa.func.count(sa.case((_is_told(connection), 1))),
    )
    if not (told == equal == found.orders == events):
        _name(connection, found)
    return sums


def _is_told(connection: Connection) -> Any:
    """Whether the event has the very text that the order makes (`payload_text`): a third of the time that reading the
    text takes. One that says the same in another form is read where the orders that differ are named."""
    parts: dict[str, Any] = {
        "amount": sa.cast(orders.c.amount, sa.Text),
        "currency": json_quoted(connection, orders.c.currency),
        "order_id": json_quoted(connection, orders.c.id),
        "qty": sa.cast(orders.c.qty, sa.Text),
        "sku": json_quoted(connection, orders.c.sku),
    }
    text: Any = sa.literal("{")
    for place, (name, value) in enumerate(parts.items()):
        text = text + sa.literal(f'{"," if place else ""}"{name}":') + value
    return sa.and_(
        outbox.c.event_type == ORDER_PLACED,
        outbox.c.aggregate_id == sa.literal("order/") + orders.c.id,
        outbox.c.payload == text + sa.literal("}"),
    )


def _says_the_same(connection: Connection) -> Any:
    payload = outbox.c.payload
    return sa.and_(
        outbox.c.event_type == ORDER_PLACED,
        outbox.c.aggregate_id == sa.literal("order/") + orders.c.id,
        json_integer(connection, payload, "amount") == orders.c.amount,
        json_text(connection, payload, "currency") == orders.c.currency,
        json_integer(connection, payload, "qty") == orders.c.qty,
        json_text(connection, payload, "sku") == orders.c.sku,
        json_text(connection, payload, "order_id") == orders.c.id,
    )


def _name(connection: Connection, found: Audit) -> None:
    order_id = business_key(order_placed_id(""))
    known = sa.exists().select_from(orders).where(orders.c.id == order_id, _PLACED)
    of_orders = sa.select(outbox.c.event_id).join_from(orders, outbox, _PLACED)
    found.look_for(
        connection,
        Check(
            "I1",
            "orders without their event",
            sa.select(orders.c.id).where(~sa.exists().select_from(outbox).where(_PLACED)),
        ),
        Check(
            "I1",
            f"{ORDER_PLACED} events without their order",
            sa.select(outbox.c.event_id).where(outbox.c.event_type == ORDER_PLACED, ~known),
        ),
        Check(
            "I1",
            f"events of an order's name that are no {ORDER_PLACED}",
            of_orders.where(outbox.c.event_type != ORDER_PLACED),
        ),
        Check(
            "I1",
            "orders of which their event says something else",
            sa.select(orders.c.id)
            .join_from(orders, outbox, _PLACED)
            .where(
                outbox.c.event_type == ORDER_PLACED, sa.not_(sa.func.coalesce(_says_the_same(connection), sa.false()))
            ),
        ),
    )

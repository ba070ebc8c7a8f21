"""Intake: an order and its event, in one transaction that also reads the intake state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, IntakePaused, NotFound
from contracts.events import ORDER_PLACED
from contracts.identifiers import order_aggregate, order_placed_id
from contracts.orders import Order
from store.control import Control, read_control
from store.dialect import built_once, lock_aggregates, lock_intake, pack, value_list
from store.outbox import append_event, append_first_events
from store.schema import PAUSED, orders

_ORDER = (orders.c.id, orders.c.sku, orders.c.qty, orders.c.amount, orders.c.currency)
# Made once: making them anew took longer than running them.
_EXISTING = sa.select(*_ORDER, orders.c.placed_at).where(orders.c.id == sa.bindparam("id"))
_RECORD = sa.insert(orders)


@built_once
def _existing(connection: Connection) -> Any:
    wanted = value_list(connection, "ids", str)
    return sa.select(*_ORDER, orders.c.placed_at).join_from(wanted, orders, orders.c.id == wanted.c.value)


@dataclass(frozen=True)
class PlacedOrder:
    """A durable order. `created` is false when it was there before; `placed_at` UTC ms.

    `cold`: nobody drains the outbox just now, so the caller wakes the pipeline after the commit.
    """

    order: Order
    placed_at: int
    created: bool
    cold: bool


def place_order(connection: Connection, order: Order, now: int) -> PlacedOrder:
    """Write the order and its `order-placed` event, or neither. `now` in UTC ms.

    The same order again with the same content is answered as the first time, also while intake is paused.
    Raises Conflict when the id names another order, IntakePaused when intake takes no new ones.
    """
    lock_intake(connection, exclusive=False)
    lock_aggregates(connection, [order_aggregate(order.id)])
    control = read_control(connection)
    existing = connection.execute(_EXISTING, {"id": order.id}).one_or_none()
    placed = _answer(order, _placed(existing) if existing is not None else None, control, now)
    if placed.created:
        record_order(connection, order, now)
        append_event(
            connection,
            event_id=order_placed_id(order.id),
            aggregate_id=order_aggregate(order.id),
            event_type=ORDER_PLACED,
            payload=order.payload(),
        )
    return placed


def place_orders(
    connection: Connection, placing: Sequence[Order], now: int
) -> list[PlacedOrder | Conflict | IntakePaused]:
    """`place_order` for each of them, in their order, with a few statements for all: an answer, or what it would raise.

    What the database refuses ends it for all of them, and nothing is to be kept then; one by one the others go on.
    """
    lock_intake(connection, exclusive=False)
    lock_aggregates(connection, [order_aggregate(order.id) for order in placing])
    control = read_control(connection)
    ids = pack(connection, [order.id for order in placing])
    known = {row[0]: _placed(row) for row in connection.execute(_existing(connection), {"ids": ids})}
    answers: list[PlacedOrder | Conflict | IntakePaused] = []
    fresh = []
    for order in placing:
        try:
            placed = _answer(order, known.get(order.id), control, now)
        except (Conflict, IntakePaused) as error:
            answers.append(error)
            continue
        if placed.created:
            fresh.append(order)
            known[order.id] = PlacedOrder(order, now, created=False, cold=False)
        answers.append(placed)
    if fresh:
        connection.execute(_RECORD, [_row(order, now) for order in fresh])
        append_first_events(
            connection,
            [(order_placed_id(o.id), order_aggregate(o.id), ORDER_PLACED, o.payload()) for o in fresh],
        )
    return answers


def _answer(order: Order, known: PlacedOrder | None, control: Control, now: int) -> PlacedOrder:
    """What `order` comes to if `known` is what its id names already; `created`: it is to be written."""
    if known is not None:
        if known.order != order:
            raise Conflict(f"order {order.id} was placed before with other content; nothing was changed")
        return known
    if control.intake == PAUSED:
        raise IntakePaused(control.paused_by)
    return PlacedOrder(order, now, created=True, cold=control.hot_until <= now)


def _placed(row: Any) -> PlacedOrder:
    return PlacedOrder(Order(*row[:5]), row[5], created=False, cold=False)


def _row(order: Order, now: int) -> dict[str, Any]:
    return {
        "id": order.id,
        "sku": order.sku,
        "qty": order.qty,
        "amount": order.amount,
        "currency": order.currency,
        "placed_at": now,
    }


def record_order(connection: Connection, order: Order, now: int) -> None:
    """Only the order's row. Whoever calls this tells the outbox of it in the same transaction, as `place_order` does;
    without that the order exists and nobody ever hears of it."""
    connection.execute(_RECORD, _row(order, now))


def get_order(connection: Connection, order_id: str) -> PlacedOrder:
    """The order of that id, or of that event id. Raises NotFound."""
    row = connection.execute(
        sa.select(*_ORDER, orders.c.placed_at)
        .where(orders.c.id.in_([order_id, order_id.removesuffix(":placed")]))
        .order_by(sa.func.length(orders.c.id).desc())
    ).first()
    if row is None:
        raise NotFound(f"there is no order {order_id}; `orders place` makes one")
    return PlacedOrder(Order(*row[:5]), row[5], created=False, cold=False)

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
from store.control import COLUMNS, Control, not_set_up
from store.dialect import Rendered, lock_aggregates, lock_intake, pack, value_list
from store.outbox import append_event, append_first_events
from store.schema import OPEN, PAUSED, control, orders

_ORDER = (orders.c.id, orders.c.sku, orders.c.qty, orders.c.amount, orders.c.currency)


def _read_standing(connection: Connection) -> Any:
    wanted = orders.c.id.in_(sa.select(value_list(connection, "ids", str).c.value))
    return sa.select(*COLUMNS, *_ORDER, orders.c.placed_at).select_from(control.outerjoin(orders, wanted))


def _read_lease_if_new(connection: Connection) -> Any:
    known = sa.exists().where(orders.c.id.in_(sa.select(value_list(connection, "ids", str).c.value)))
    return sa.select(control.c.hot_until).where(control.c.intake == sa.literal_column(f"'{OPEN}'"), ~known)


_STANDING = Rendered(_read_standing, "ids")
_LEASE_IF_NEW = Rendered(_read_lease_if_new, "ids")
_RECORD = Rendered(lambda _: sa.insert(orders).inline(), "id", "sku", "qty", "amount", "currency", "placed_at")


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
    _lock(connection, [order])
    control, known = _standing(connection, [order])
    placed = _answer(order, known.get(order.id), control, now)
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
    _lock(connection, placing)
    hot_until = _lease_if_new(connection, placing)
    if hot_until is not None:
        _record_with_events(connection, placing, now)
        return [PlacedOrder(order, now, created=True, cold=hot_until <= now) for order in placing]
    control, known = _standing(connection, placing)
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
        _record_with_events(connection, fresh, now)
    return answers


def _lock(connection: Connection, placing: Sequence[Order]) -> None:
    """From here on neither the intake's state nor one of these orders changes until the transaction ends."""
    lock_intake(connection, exclusive=False)
    lock_aggregates(connection, [order_aggregate(order.id) for order in placing])


def _lease_if_new(connection: Connection, placing: Sequence[Order]) -> int | None:
    """`hot_until` if intake takes orders and each of these is a new one, which is all that nearly every group has to
    know; else None."""
    ids = {order.id for order in placing}
    if len(ids) < len(placing):
        return None
    hot_until: int | None = _LEASE_IF_NEW(connection, (pack(connection, list(ids)),)).scalar_one_or_none()
    return hot_until


def _standing(connection: Connection, placing: Sequence[Order]) -> tuple[Control, dict[str, PlacedOrder]]:
    """The control row, and by its id each of the orders whose id is taken. Raises NotFound before `init`."""
    rows = _STANDING(connection, (pack(connection, [order.id for order in placing]),)).all()
    if not rows:
        raise not_set_up()
    width = len(COLUMNS)
    known = {row[width]: _placed(row[width:]) for row in rows if row[width] is not None}
    return Control(*rows[0][:width]), known


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


def _record_with_events(connection: Connection, fresh: Sequence[Order], now: int) -> None:
    _RECORD(connection, [_row(order, now) for order in fresh])
    append_first_events(
        connection,
        [(order_placed_id(o.id), order_aggregate(o.id), ORDER_PLACED, o.payload()) for o in fresh],
    )


def _row(order: Order, now: int) -> tuple[Any, ...]:
    return (order.id, order.sku, order.qty, order.amount, order.currency, now)


def record_order(connection: Connection, order: Order, now: int) -> None:
    """Only the order's row. Whoever calls this tells the outbox of it in the same transaction, as `place_order` does;
    without that the order exists and nobody ever hears of it."""
    _RECORD(connection, _row(order, now))


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

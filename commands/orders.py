"""`orders place` and `orders show`. Order n is `order-n` and has amount 100·n JPY, unless its fields are given."""

import asyncio
from argparse import ArgumentParser, Namespace

from rich.progress import track

from commands.api_client import add_api_flag, place_through
from commands.context import Context
from commands.parsing import Commands, command
from contracts.orders import Order, parse_order
from intake import Intake
from store.clock import iso
from store.orders import PlacedOrder, get_order


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("orders", "place and show orders")
    place = command(group, "place", _place, "place orders", "starter.py orders place --start 1 --count 12")
    _add_place_flags(place)
    show = command(group, "show", _show, "show one order and its event", "starter.py orders show order-7")
    show.add_argument("id", help="an order's id or its event's")


def _add_place_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--start", type=int, default=1, help="number of the first order (1 if not said)")
    parser.add_argument("--count", type=int, default=1, help="how many orders (1 if not said)")
    add_api_flag(parser, "place them through the HTTP API", default=None)


def numbered_order(number: int) -> Order:
    """Order n: `order-n`, amount 100·n JPY. Raises InvalidInput for n < 1 or an amount out of bounds."""
    return parse_order(
        {"id": f"order-{number}", "sku": f"sku-{number % 10}", "qty": 1, "amount": 100 * number, "currency": "JPY"}
    )


def order_document(placed: PlacedOrder) -> dict[str, object]:
    """The order as JSON shows it, here and over HTTP."""
    return {
        "id": placed.order.id,
        "sku": placed.order.sku,
        "qty": placed.order.qty,
        "amount": placed.order.amount,
        "currency": placed.order.currency,
        "placed_at": iso(placed.placed_at),
    }


async def _place(context: Context, args: Namespace) -> int:
    orders = [numbered_order(number) for number in range(args.start, args.start + args.count)]
    if args.api is not None:
        return await place_through(args.api, context, orders)

    async def wake() -> None:
        await (await context.runs()).wake()

    intake = Intake(context.database, wake)
    placed = []
    cold: PlacedOrder | None = None
    shown = track(orders, "placing", console=context.messages, transient=True, disable=context.json or len(orders) < 20)
    try:
        for order in shown:
            placed.append(await asyncio.to_thread(intake.place, order))
            if placed[-1].cold and cold is None:
                cold = placed[-1]
    finally:
        # Also when a later one was refused: those before it are durable, and should not wait for the look.
        if cold is not None and not await intake.wake_if_cold(cold):
            context.say("the orders are recorded; Temporal does not answer, so they flow once it is back")
    new = sum(each.created for each in placed)
    if context.json:
        context.result({"placed": new, "known": len(placed) - new, "orders": [order_document(each) for each in placed]})
    else:
        context.out.print(f"{new} orders placed, {len(placed) - new} were known")
    return 0


async def _show(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        placed = get_order(connection, args.id)
    if context.json:
        context.result(order_document(placed))
    else:
        for name, value in order_document(placed).items():
            context.out.print(f"{name:10} {value}", markup=False)
    return 0

"""`orders place` and `orders show`. Order n is `order-n` and has amount 100·n JPY, unless its fields are given."""

import asyncio
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from commands.api_client import add_api_flag, place_through
from commands.context import Context
from commands.events import event_document, print_event
from commands.following import watched
from commands.parsing import Commands, WrongUsage, command, whole_number
from commands.telling import wake
from contracts.counts import counted
from contracts.identifiers import order_placed_id
from contracts.orders import Order, parse_order
from intake import Intake
from store.documents import order_document
from store.orders import PlacedOrder, get_order

_MOST = 1_000_000
_OWN = ("sku", "qty", "amount", "currency")


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("orders")
    place = command(group, "place", _place, "place orders", "starter.py orders place --start 1 --count 12")
    place.epilog = f"{place.epilog}\n  starter.py orders place --id A-7 --sku tea --qty 2 --amount 1980 --currency JPY"
    number = whole_number(1, 10**10)
    place.add_argument("--start", type=number, metavar="N", help="number of the first order (1 if not said)")
    place.add_argument("--count", type=whole_number(1, _MOST), metavar="N", help="how many (1 if not said)")
    place.add_argument("--id", help="the id of one order of your own; instead of --start and --count")
    place.add_argument("--sku", help="what is ordered")
    place.add_argument("--qty", help="how many of it (1 if not said)")
    place.add_argument("--amount", help="the price of all, in the currency's minor units")
    place.add_argument("--currency", help="ISO 4217 code (JPY if not said)")
    add_api_flag(place, "place them through the HTTP API", default=None)
    show = command(
        group, "show", _show, "show one order, its event and its deliveries", "starter.py orders show order-7"
    )
    show.add_argument("id", metavar="ID", help="an order's id or its event's")


def numbered_order(number: int) -> Order:
    """Order n: `order-n`, amount 100·n JPY. Raises InvalidInput for n < 1 or an amount out of bounds."""
    return parse_order(
        {"id": f"order-{number}", "sku": f"sku-{number % 10}", "qty": 1, "amount": 100 * number, "currency": "JPY"}
    )


def _chosen_orders(args: Namespace) -> Sequence[Order]:
    """The orders that the arguments describe. Raises WrongUsage, or InvalidInput that names the field."""
    own = {name: getattr(args, name) for name in _OWN if getattr(args, name) is not None}
    if args.id is None:
        if own:
            raise WrongUsage(f"--{next(iter(own))} is for an order of your own, which needs --id")
        start = args.start or 1
        return [numbered_order(number) for number in range(start, start + (args.count or 1))]
    if args.start is not None or args.count is not None:
        raise WrongUsage("--id is one order; --start and --count are for numbered ones")
    missing = [f"--{name}" for name in ("sku", "amount") if name not in own]
    if missing:
        raise WrongUsage(f"an order of your own needs {' and '.join(missing)}")
    fields: dict[str, object] = {"id": args.id, "qty": "1", "currency": "JPY", **own}
    for name in ("qty", "amount"):
        # What is no number is left as text, so that the order's own rules name the field.
        if re.fullmatch(r"-?[0-9]{1,18}", str(fields[name])):
            fields[name] = int(str(fields[name]))
    return [parse_order(fields)]


async def _place(context: Context, args: Namespace) -> int:
    orders = _chosen_orders(args)
    placed = await (_place_here(context, orders) if args.api is None else place_through(args.api, context, orders))
    new = sum(created for _, created in placed)
    if context.json:
        context.result({"placed": new, "known": len(placed) - new, "orders": [document for document, _ in placed]})
    else:
        known = f", {len(placed) - new} known before" if new < len(placed) else ""
        context.line(f"{counted(new, 'order')} placed{known}")
    return 0


async def _place_here(context: Context, orders: Sequence[Order]) -> list[tuple[Mapping[str, Any], bool]]:
    """Place them in the database, and wake the pipeline; each as it is recorded, and whether it is new."""
    intake = Intake(context.database, partial(wake, context))
    placed: list[PlacedOrder] = []
    cold = False
    try:
        with watched(context, "placing", orders) as shown:
            for order in shown:
                placed.append(await asyncio.to_thread(intake.place, order))
                cold = cold or placed[-1].cold
    finally:
        # Also when a later one was refused: those before it are durable, and should not wait for the look.
        if 0 < len(placed) < len(orders):
            # Broken off, the one that was on its way may be recorded as well.
            context.say(f"recorded: at least {len(placed)} of {counted(len(orders), 'order')}")
        if cold:
            await wake(context)
    return [(order_document(each), each.created) for each in placed]


async def _show(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        document = order_document(get_order(connection, args.id))
        event = event_document(connection, order_placed_id(str(document["id"])))
    if context.json:
        context.result({**document, "event": event})
    else:
        context.fields(document)
        context.line("")
        print_event(context, event)
    return 0

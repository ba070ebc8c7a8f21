"""`event publish`, `event show`, `event deliver` and `event duplicate`. An event may be named by its order."""

from argparse import Namespace
from typing import Any

from sqlalchemy import Connection
from temporalio.client import WorkflowFailureError

from commands.context import Context
from commands.parsing import Commands, command, whole_number
from commands.telling import wake
from commands.waiting import failure, result_of
from contracts.counts import counted
from contracts.errors import NotFound, Refused
from contracts.messages import DeliveryInput
from contracts.names import FAN_OUT_ID
from store.clock import iso
from store.deliveries import DONE, PENDING, Delivery, deliveries_of
from store.outbox import find_event, publish_again
from store.receiver_ends import read_end
from store.receivers import get_hold, registered_receivers

_MOST_TIMES = 100_000
_AT_ONCE = 1000  # entries of one push


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("event")
    publish = command(
        group,
        "publish",
        _publish,
        "send a recorded event through the pipeline again; deliveries that are missing are added, the others stay",
        "starter.py event publish order-7:placed",
    )
    show = command(group, "show", _show, "show an event and its deliveries", "starter.py event show order-7:placed")
    deliver = command(
        group,
        "deliver",
        _deliver,
        "take one attempt by hand; a failure leaves the delivery as it was",
        "starter.py event deliver mail order-7:placed",
    )
    deliver.add_argument("receiver", metavar="RECEIVER", help="the receiver's name")
    deliver.add_argument("--fail", action="store_true", help="a drill: the receiver fails")
    for each in (publish, show, deliver):
        each.add_argument("event", metavar="EVENT", help="an event's id or its order's")
    duplicate = command(
        group,
        "duplicate",
        _duplicate,
        "a drill: push an event's id into the Redis list again; its effects stay single",
        "starter.py event duplicate --order 1 --times 3",
    )
    duplicate.add_argument("--order", metavar="ORDER", required=True, help="an order's number or id, or its event's id")
    duplicate.add_argument(
        "--times", type=whole_number(1, _MOST_TIMES), default=1, metavar="N", help="how often (once if not said)"
    )


def event_document(connection: Connection, name: str) -> dict[str, Any]:
    """The event of that id, or of that order, and its deliveries, as JSON shows them.

    `held` is a pending delivery at a receiver that is on hold. Raises NotFound.
    """
    row = find_event(connection, name)
    event = row.event
    deliveries = deliveries_of(connection, event.event_id)
    held = {each.receiver for each in deliveries if each.status == PENDING and get_hold(connection, each.receiver)}
    return {
        "event_id": event.event_id,
        "aggregate_id": event.aggregate_id,
        "seq": event.seq,
        "event_type": event.event_type,
        "payload": dict(event.payload),
        "status": row.status,
        "published_at": _time(row.published_at),
        "fanned_out_at": _time(row.fanned_out_at),
        "deliveries": [
            {
                "receiver": delivery.receiver,
                "state": "held" if delivery.receiver in held else delivery.status,
                "attempts": delivery.attempts,
                "last_error": delivery.last_error,
                "next_attempt_at": _time(delivery.next_attempt_at),
            }
            for delivery in deliveries
        ],
    }


def print_event(context: Context, document: dict[str, Any]) -> None:
    """The event and its deliveries, for a person."""
    context.fields({name: value for name, value in document.items() if name not in ("payload", "deliveries")})
    if document["deliveries"]:
        columns = ["receiver", "state", "attempts", "next_attempt_at", "last_error"]
        context.line("")
        context.table(
            [column.replace("_", " ") for column in columns],
            ([delivery[column] for column in columns] for delivery in document["deliveries"]),
        )


async def _publish(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        event = publish_again(connection, find_event(connection, args.event).event.event_id)
    await wake(context)
    if context.json:
        context.result({"event_id": event.event_id, "published": True})
    else:
        context.line(f"{event.event_id} goes through the pipeline again")
    return 0


async def _show(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        document = event_document(connection, args.event)
    if context.json:
        context.result(document)
    else:
        print_event(context, document)
    return 0


async def _deliver(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        before = _delivery(connection, args.receiver, args.event)
    event, error = before.event, None
    if before.status != DONE:
        message = DeliveryInput(args.receiver, event.event_id, event.aggregate_id, manual=True, fail=args.fail)
        handle = await (await context.runs()).start_delivery(message)
        try:
            await result_of(context, handle)
        except WorkflowFailureError as failed:
            why = failure(failed)
            if why.kind != "ReceiverFailed":
                raise Refused(why.text) from failed
            error = why.text
    with context.database.read() as connection:
        after = _delivery(connection, args.receiver, event.event_id)
    if context.json:
        context.result(
            {
                "receiver": args.receiver,
                "event_id": event.event_id,
                "outcome": "failed" if error else "delivered" if before.status != DONE else "was done before",
                "state": after.status,
                "attempts": after.attempts,
                "error": error,
            }
        )
    else:
        context.line(f"{args.receiver}: {f'failed; {after.status} retained' if error else after.status}")
    if error:
        context.say(error)
    return 1 if error else 0


async def _duplicate(context: Context, args: Namespace) -> int:
    name = f"order-{args.order}" if args.order.isascii() and args.order.isdigit() else args.order
    with context.database.read() as connection:
        event = find_event(connection, name).event
    left = args.times
    while left:
        chunk = min(left, _AT_ONCE)
        context.events.push([event.event_id] * chunk)
        left -= chunk
    await wake(context, [FAN_OUT_ID])
    if context.json:
        context.result({"event_id": event.event_id, "pushed": args.times})
    else:
        context.line(f"{event.event_id} pushed {counted(args.times, 'time')} more")
    return 0


def _delivery(connection: Connection, receiver: str, name: str) -> Delivery:
    """Raises NotFound for what of it does not exist, Refused where the receiver was ended before the event."""
    known = registered_receivers(connection)
    if receiver not in known:
        raise NotFound(f"there is no receiver {receiver}; there are {', '.join(known)}")
    event_id = find_event(connection, name).event.event_id
    end = read_end(connection, receiver)
    for delivery in deliveries_of(connection, event_id):
        if delivery.receiver == receiver:
            return delivery
    if end is not None and end.ended_at is not None:
        raise Refused(f"{event_id} is not for {receiver}: {end.sentence()}")
    raise NotFound(f"there is no delivery of {event_id} to {receiver} yet; `event publish` registers what is missing")


def _time(ms: int | None) -> str | None:
    return None if ms is None else iso(ms)

"""`queues`: what waits between the stages, in Redis and at each receiver."""

from argparse import Namespace
from typing import Any

from commands.context import Context
from commands.output import short
from commands.parsing import Commands
from contracts.counts import counted
from contracts.names import OUTBOX_LIST
from store.clock import iso
from store.deliveries import DEAD, PENDING, RETRYING
from store.status import count_invalid, list_invalid, outbox_status, receiver_status

_SHOWN = 10


def add(commands: Commands) -> None:
    """Register the command."""
    queues = commands.command("queues", _queues, "starter.py queues --summary")
    queues.add_argument("--summary", action="store_true", help="counts only, not the first entries")


async def _queues(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        outbox = outbox_status(connection)
        receivers = receiver_status(connection)
        invalid = count_invalid(connection)
        examples = [] if args.summary else list_invalid(connection, _SHOWN)
    events = context.events
    document: dict[str, Any] = {
        "list": events.length(),
        "in_flight": outbox.in_flight,
        "pending": outbox.pending,
        "processed": events.processed_count(),
        "invalid": invalid,
        "receivers": {
            status.receiver: {
                "waiting": status.counts[PENDING],
                "retrying": status.counts[RETRYING],
                "dead": status.counts[DEAD],
                "held": status.held_since is not None,
            }
            for status in receivers
        },
    }
    if not args.summary:
        document["first_entries"] = [entry.decode(errors="backslashreplace") for entry in events.head(_SHOWN)]
        document["invalid_entries"] = [
            {"entry": entry, "reason": reason, "seen_at": iso(seen_at)} for entry, reason, seen_at in examples
        ]
    if context.json:
        context.result(document)
    else:
        _print(context, document)
    return 0


def _print(context: Context, document: dict[str, Any]) -> None:
    context.fields(
        {
            OUTBOX_LIST: f"{counted(document['list'], 'entry', 'entries')}, "
            f"{counted(document['in_flight'], 'event')} in flight",
            "outbox": f"{counted(document['pending'], 'event')} left for the relay",
            "processed": counted(document["processed"], "event id"),
            "invalid": f"{counted(document['invalid'], 'entry', 'entries')} kept aside",
        }
    )
    context.line("")
    columns = ["waiting", "retrying", "dead"]
    context.table(
        ["receiver", *columns, ""],
        (
            [name, *(queue[column] for column in columns), "on hold" if queue["held"] else ""]
            for name, queue in document["receivers"].items()
        ),
    )
    if document.get("first_entries"):
        context.line("")
        context.table(["first entries"], ([short(entry)] for entry in document["first_entries"]))
    if document.get("invalid_entries"):
        context.line("")
        context.table(
            ["invalid entry", "reason"], ([short(e["entry"]), e["reason"]] for e in document["invalid_entries"])
        )

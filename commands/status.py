"""`status`: what there is and where it stands, read in one snapshot."""

from argparse import Namespace
from typing import Any

from sqlalchemy import Connection
from temporalio.service import RPCError

from commands.context import Context
from commands.parsing import Commands, command
from commands.waiting import worker_answers
from contracts.errors import Unreachable
from store.clock import iso
from store.control import read_control
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.jobs import count_jobs
from store.status import ReceiverStatus, count_orders, outbox_status, receiver_status, sales_by_currency


def add(commands: Commands) -> None:
    """Register the command."""
    command(commands.top, "status", _status, "show what there is and where it stands", "starter.py status --json")


def receiver_document(status: ReceiverStatus) -> dict[str, Any]:
    """A receiver as JSON shows it. `held` are its pending deliveries while it is on hold."""
    held = status.held_since is not None
    pending = status.counts[PENDING]
    return {
        "pending": 0 if held else pending,
        "retrying": status.counts[RETRYING],
        "held": pending if held else 0,
        "dead": status.counts[DEAD],
        "done": status.counts[DONE],
        "waived": status.counts[WAIVED],
        "held_since": iso(status.held_since) if status.held_since is not None else None,
        "reason": status.reason,
        "last_progress": iso(status.last_progress) if status.last_progress is not None else None,
    }


def status_document(connection: Connection) -> dict[str, Any]:
    """All that the database knows, as JSON shows it, here and over HTTP."""
    control = read_control(connection)
    outbox = outbox_status(connection)
    totals = sales_by_currency(connection, control.active_generation)
    return {
        "orders": count_orders(connection),
        "outbox": {"pending": outbox.pending, "in_flight": outbox.in_flight, "fanned_out": outbox.fanned_out},
        "receivers": {status.receiver: receiver_document(status) for status in receiver_status(connection)},
        "jobs": count_jobs(connection),
        "intake": {"state": control.intake, "paused_by": control.paused_by},
        "generation": {
            "active": control.active_generation,
            "epoch": control.epoch,
            "totals": {currency: {"orders": n, "amount": amount} for currency, (n, amount) in totals.items()},
        },
    }


async def _status(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        document = status_document(connection)
    document["worker"] = await _worker(context)
    if context.json:
        context.result(document)
    else:
        _print(context, document)
    return 0


async def _worker(context: Context) -> str:
    try:
        client = await context.client()
        return "answers" if await worker_answers(client) else "does not answer"
    except (Unreachable, RPCError) as error:
        return f"unknown: {error}"


def _print(context: Context, document: dict[str, Any]) -> None:
    generation = document["generation"]
    totals = ", ".join(
        f"{total['orders']:,} orders, {total['amount']:,} {currency}"
        for currency, total in generation["totals"].items()
    )
    by = document["intake"]["paused_by"]
    context.fields(
        {
            "orders": document["orders"],
            "outbox": ", ".join(f"{number} {state}" for state, number in document["outbox"].items()),
            "jobs": ", ".join(f"{number} {state}" for state, number in document["jobs"].items()) or "none",
            "intake": document["intake"]["state"] + (f" by {by}" if by else ""),
            "generation": f"{generation['active']} ({totals or 'no sales yet'})",
            "worker": document["worker"],
        }
    )
    context.line("")
    states = ["pending", "retrying", "held", "dead", "done", "waived"]
    context.table(
        ["receiver", *states, "reason"],
        (
            [name, *(receiver[state] for state in states), receiver["reason"]]
            for name, receiver in document["receivers"].items()
        ),
    )

"""`status`: what there is and where it stands, read in one snapshot."""

from argparse import Namespace
from typing import Any

from redis import RedisError
from temporalio.service import RPCError

from commands.context import Context
from commands.parsing import Commands
from contracts.counts import counted
from contracts.errors import Refused, Unreachable
from receivers.registry import by_name
from runs.presence import worker_answers
from store.documents import status_document


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("status", _status, "starter.py status --json")


async def _status(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        document = status_document(connection)
    document["redis"] = _redis(context)
    document["worker"] = await _worker(context)
    if context.json:
        context.result(document)
    else:
        _print(context, document)
    return 0


def _redis(context: Context) -> str:
    try:
        context.events.require_pushes()
    except (Unreachable, RedisError) as error:
        return f"unknown: {error}"
    except Refused as error:
        return str(error)
    return "answers"


async def _worker(context: Context) -> str:
    try:
        client = await context.client()
        return "answers" if await worker_answers(client) else "does not answer"
    except (Unreachable, RPCError) as error:
        return f"unknown: {error}"


def _print(context: Context, document: dict[str, Any]) -> None:
    generation = document["generation"]
    totals = ", ".join(
        f"{counted(total['orders'], 'order')}, {total['amount']:,} {currency}"
        for currency, total in generation["totals"].items()
    )
    by = document["intake"]["paused_by"]
    rebuild = document["rebuild"]
    context.fields(
        {
            "orders": document["orders"],
            "outbox": ", ".join(f"{number} {state}" for state, number in document["outbox"].items()),
            "jobs": ", ".join(f"{number} {state}" for state, number in document["jobs"].items()) or "none",
            "intake": document["intake"]["state"] + (f" by {by}" if by else ""),
            "generation": f"{generation['active']} ({totals or 'no sales yet'})",
            "rebuild": f"{rebuild['rebuild']} runs: {rebuild['phase']}, {rebuild['replayed']:,} of "
            f"{rebuild['expected']:,} replayed into {rebuild['generation']}"
            if rebuild
            else None,
            "Redis": document["redis"],
            "worker": document["worker"],
        }
    )
    context.line("")
    registry = by_name()
    states = ["pending", "retrying", "held", "dead", "done", "waived"]
    context.table(
        ["receiver", *states, "oldest", ""],
        (
            [
                name,
                *(receiver[state] for state in states),
                _age(receiver["oldest_seconds"]),
                _remark(receiver, known=name in registry),
            ]
            for name, receiver in document["receivers"].items()
        ),
    )
    if document["stalls"]:
        context.line("")
        for stall in document["stalls"]:
            context.line(f"stalled: {stall['sentence']}")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _remark(receiver: dict[str, Any], *, known: bool) -> str:
    remarks = [] if known else ["not in the registry, see `receivers list`"]
    if receiver["held_since"]:
        remarks.append(f"on hold since {receiver['held_since']}: {receiver['reason']}")
    if receiver["fault"]:
        remarks.append(f"drill switch is on: {receiver['fault']}")
    return "; ".join(remarks)

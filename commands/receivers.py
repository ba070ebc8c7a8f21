"""`receivers list` and `receivers end`: who takes which events, and ending one that was taken out of the registry."""

import asyncio
from argparse import Namespace
from typing import Any

from sqlalchemy import Connection

from commands.chunks import NARROWEST, in_chunks
from commands.context import Context
from commands.parsing import Commands, command
from commands.person import who
from commands.telling import tell
from contracts.counts import counted
from contracts.errors import Refused
from contracts.names import receiver_id
from receivers.registry import by_name
from store.clock import iso, now_ms
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.receiver_ends import ReceiverEnd, begin_end, finish_end, read_end, waive_chunk
from store.receivers import registered_receivers, subscriptions_of
from store.status import count_deliveries, receiver_status

_UNFINISHED = (PENDING, RETRYING, DEAD)


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("receivers")
    command(
        group,
        "list",
        _list,
        "list the receivers: what each takes and since when, and what waits there",
        "starter.py receivers list",
    )
    end = command(
        group,
        "end",
        _end,
        "end a receiver that was taken out of the registry: it takes no event any more, and what it has not taken is "
        "waived, on record",
        'starter.py receivers end mail --reason "the mailing house does it"',
    )
    end.add_argument("receiver", metavar="NAME", help="the receiver's name")
    end.add_argument("--reason", required=True, help="why, in one line; it stays on record")


async def _list(context: Context, args: Namespace) -> int:
    registry = by_name()
    with context.database.read() as connection:
        known = registered_receivers(connection)
        found = [_document(connection, name, in_registry=name in registry) for name in known]
    found += [{"receiver": name, "state": "new", "in_registry": True} for name in sorted(set(registry) - set(known))]
    if context.json:
        context.result(found)
        return 0
    states = ["pending", "retrying", "held", "dead", "waived"]
    context.table(
        ["receiver", "state", "takes", *states, ""],
        (
            [
                each["receiver"],
                each["state"],
                ", ".join(f"{kind} after {since:,}" for kind, since in each.get("takes", {}).items()),
                *(each.get(state) for state in states),
                _remark(each),
            ]
            for each in found
        ),
    )
    return 0


def _document(connection: Connection, name: str, *, in_registry: bool) -> dict[str, Any]:
    """A receiver as JSON shows it. `takes`: event type -> the position after which it takes them."""
    end = read_end(connection, name)
    counts = count_deliveries(connection, name)
    held = any(each.receiver == name and each.held_since is not None for each in receiver_status(connection))
    return {
        "receiver": name,
        "state": "subscribed" if end is None else "being ended" if end.ended_at is None else "ended",
        "in_registry": in_registry,
        "takes": subscriptions_of(connection, name),
        "pending": 0 if held else counts[PENDING],
        "retrying": counts[RETRYING],
        "held": counts[PENDING] if held else 0,
        "dead": counts[DEAD],
        "done": counts[DONE],
        "waived": counts[WAIVED],
        "end": None if end is None else _end_document(end),
    }


def _remark(receiver: dict[str, Any]) -> str:
    end = receiver.get("end")
    if end is not None:
        when = f"at {end['ended_at']}" if end["ended_at"] else f"since {end['begun_at']}"
        return f"by {end['ended_by']} {when}: {end['reason']}"
    if receiver["state"] == "new":
        return "in the registry; the next start of the worker registers it"
    return "" if receiver["in_registry"] else "not in the registry; `receivers end` ends it"


def _end_document(end: ReceiverEnd) -> dict[str, Any]:
    return {
        "reason": end.reason,
        "ended_by": end.by,
        "begun_at": iso(end.begun_at),
        "ended_at": iso(end.ended_at),
    }


async def _end(context: Context, args: Namespace) -> int:
    name = args.receiver
    if name in by_name():
        raise Refused(
            f"{name} is in receivers/registry.py and would be registered again; take it out there, restart worker and "
            "API, then end it"
        )
    with context.database.write() as connection:
        end, created = begin_end(connection, name, args.reason, who(), now_ms())
        waiting = sum(count_deliveries(connection, name)[state] for state in _UNFINISHED)
    if end.ended_at is None:
        await in_chunks(
            context,
            f"ending {name}",
            waiting,
            lambda connection, limit: waive_chunk(connection, name, now_ms(), limit),
        )
        end = await asyncio.to_thread(_finished, context, name)
        await _end_run(context, end)
    with context.database.read() as connection:
        waived = count_deliveries(connection, name)[WAIVED]
    if context.json:
        context.result({"receiver": name, "created": created, "waived": waived, **_end_document(end)})
    else:
        context.line(f"{end.sentence()} ({counted(waived, 'event')} waived there in all)")
    return 0


def _finished(context: Context, name: str) -> ReceiverEnd:
    end = None
    while end is None:
        with context.database.write() as connection:
            end = finish_end(connection, name, now_ms(), NARROWEST)
    return end


async def _end_run(context: Context, end: ReceiverEnd) -> None:
    """Its long-lived run ends now; where Temporal does not answer, with its next drain."""
    await tell(context, lambda runs: runs.end_stage(receiver_id(end.receiver), end.sentence()))

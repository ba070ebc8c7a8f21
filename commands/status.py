"""`status`: what there is and where it stands, read in one snapshot."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from temporalio.service import RPCError

from commands.context import Context
from commands.parsing import Commands, command
from commands.waiting import worker_answers
from contracts.errors import Unreachable
from store.clock import iso, now_ms
from store.control import read_control
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.faults import list_faults
from store.jobs import count_jobs
from store.rebuild import running_rebuild
from store.stalls import Backlog, backlogs, oldest_by_state
from store.status import ReceiverStatus, count_orders, outbox_status, receiver_status, sales_by_currency


def add(commands: Commands) -> None:
    """Register the command."""
    command(commands.top, "status", _status, "show what there is and where it stands", "starter.py status --json")


def receiver_document(
    status: ReceiverStatus, oldest: Mapping[str, int | None], fault: str | None, now: int
) -> dict[str, Any]:
    """A receiver as JSON shows it. `held` are its pending deliveries while it is on hold; `oldest_seconds`: how long
    the oldest that is neither taken nor given up waits; `fault`: the drill switch that is on."""
    waiting = [since for state in (PENDING, RETRYING) if (since := oldest.get(state)) is not None]
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
        "fault": fault,
        "oldest_seconds": round(max(0, now - min(waiting)) / 1000, 1) if waiting else None,
        "oldest_dead_seconds": None if (dead := oldest.get(DEAD)) is None else round(max(0, now - dead) / 1000, 1),
        "last_progress": iso(status.last_progress) if status.last_progress is not None else None,
    }


def status_document(connection: Connection) -> dict[str, Any]:
    """All that the database knows, as JSON shows it."""
    now = now_ms()
    control = read_control(connection)
    faults = list_faults(connection)
    rebuild = running_rebuild(connection)
    outbox = outbox_status(connection)
    totals = sales_by_currency(connection, control.active_generation)
    return {
        "orders": count_orders(connection),
        "outbox": {"pending": outbox.pending, "in_flight": outbox.in_flight, "fanned_out": outbox.fanned_out},
        "receivers": {
            status.receiver: receiver_document(
                status, oldest_by_state(connection, status.receiver), faults.get(status.receiver), now
            )
            for status in receiver_status(connection)
        },
        "jobs": count_jobs(connection),
        "intake": {"state": control.intake, "paused_by": control.paused_by},
        "rebuild": None
        if rebuild is None
        else {
            "rebuild": rebuild.rebuild_id,
            "phase": rebuild.phase,
            "generation": rebuild.generation,
            "expected": rebuild.expected,
            "replayed": rebuild.replayed,
        },
        "stalls": [_stall_document(each) for each in backlogs(connection, now) if each.stalled(now)],
        "generation": {
            "active": control.active_generation,
            "epoch": control.epoch,
            "totals": {currency: {"orders": n, "amount": amount} for currency, (n, amount) in totals.items()},
        },
    }


def _stall_document(stall: Backlog) -> dict[str, Any]:
    return {
        "stage": stall.stage,
        "event_id": stall.event_id,
        "since": iso(stall.since),
        "waits_for": stall.waits_for,
        "last_progress": iso(stall.progress),
        "sentence": stall.sentence(),
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
            "worker": document["worker"],
        }
    )
    context.line("")
    states = ["pending", "retrying", "held", "dead", "done", "waived"]
    context.table(
        ["receiver", *states, "oldest", ""],
        (
            [name, *(receiver[state] for state in states), _age(receiver["oldest_seconds"]), _remark(receiver)]
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


def _remark(receiver: dict[str, Any]) -> str:
    remarks = []
    if receiver["held_since"]:
        remarks.append(f"on hold since {receiver['held_since']}: {receiver['reason']}")
    if receiver["fault"]:
        remarks.append(f"drill switch is on: {receiver['fault']}")
    return "; ".join(remarks)

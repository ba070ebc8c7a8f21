"""`audit`: whether the invariants hold, read in one snapshot; what breaks one is named, and the exit code is 1."""

from argparse import Namespace
from typing import Any

from commands.context import Context
from commands.parsing import Commands
from contracts.counts import counted
from store.audit import audit
from store.audit_findings import Audit
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED

_STATES = (PENDING, RETRYING, DONE, DEAD, WAIVED)
_CHECKED = ("I1", "I2", "I3", "I4", "I5", "I6")


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("audit", _audit, "starter.py audit")


def audit_document(found: Audit) -> dict[str, Any]:
    """The audit as JSON shows it."""
    return {
        "clean": found.clean,
        "checked": list(_CHECKED),
        "orders": found.orders,
        "events": found.events,
        "jobs": found.jobs,
        "charges": found.charges,
        "shipments": found.shipments,
        "receivers": {
            each.receiver: {"events": each.events, "not_fanned_out": each.not_fanned_out, **each.states}
            for each in found.receivers
        },
        "generation": {
            "active": found.generation,
            "rows": {currency: {"orders": n, "amount": amount} for currency, (n, amount) in found.sales.items()},
        },
        "breaks": [
            {"invariant": each.invariant, "what": each.what, "count": each.count, "ids": list(each.ids)}
            for each in found.breaks
        ],
    }


async def _audit(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        found = audit(connection)
    if context.json:
        context.result(audit_document(found))
    else:
        _print(context, found)
    return 0 if found.clean else 1


def _print(context: Context, found: Audit) -> None:
    rows = ", ".join(f"{counted(n, 'order')}, {amount:,} {currency}" for currency, (n, amount) in found.sales.items())
    context.fields(
        {
            "orders": f"{found.orders:,}, {counted(found.events, 'event')}",
            "jobs": f"{found.jobs:,}, {counted(found.charges, 'charge')}, {counted(found.shipments, 'shipment')}",
            "generation": f"{found.generation} ({rows or 'no sales yet'})",
        }
    )
    context.line("")
    context.table(
        ["receiver", "events", "not fanned out", *_STATES],
        (
            [each.receiver, each.events, each.not_fanned_out, *(each.states[state] for state in _STATES)]
            for each in found.receivers
        ),
    )
    context.line("")
    if found.clean:
        context.line(f"clean: {', '.join(_CHECKED)} hold")
        return
    for each in found.breaks:
        more = f" and {each.count - len(each.ids):,} more" if each.count > len(each.ids) else ""
        context.line(f"{each.invariant} broken: {each.what} ({each.count:,}): {', '.join(each.ids)}{more}")

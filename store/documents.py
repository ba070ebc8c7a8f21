"""What the database holds, as JSON shows it: one document each, the same on the command line and over HTTP."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from store.clock import iso, now_ms
from store.control import read_control
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.faults import list_faults
from store.jobs import count_jobs
from store.orders import PlacedOrder
from store.rebuild import Rebuild, running_rebuild
from store.stalls import Backlog, backlogs, oldest_by_state
from store.status import ReceiverStatus, count_orders, outbox_status, receiver_status, sales_by_currency


def order_document(placed: PlacedOrder) -> dict[str, Any]:
    """An order and when it was first placed: the same for its first answer and each later one."""
    order = placed.order
    return {
        "id": order.id,
        "sku": order.sku,
        "qty": order.qty,
        "amount": order.amount,
        "currency": order.currency,
        "placed_at": iso(placed.placed_at),
    }


def sales_document(connection: Connection) -> dict[str, Any]:
    """The totals of the active generation, both read in one snapshot so that they belong together."""
    generation = read_control(connection).active_generation
    totals = _totals(connection, generation)
    return {
        "generation": generation,
        "orders": sum(total["orders"] for total in totals.values()),
        "totals": totals,
    }


def status_document(connection: Connection) -> dict[str, Any]:
    """All that the database knows of what there is and where it stands, of one snapshot."""
    now = now_ms()
    control = read_control(connection)
    faults = list_faults(connection)
    rebuild = running_rebuild(connection)
    outbox = outbox_status(connection)
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
        "rebuild": None if rebuild is None else _rebuild_document(rebuild),
        "stalls": [_stall_document(each) for each in backlogs(connection, now) if each.stalled(now)],
        "generation": {
            "active": control.active_generation,
            "epoch": control.epoch,
            "totals": _totals(connection, control.active_generation),
        },
    }


def receiver_document(
    status: ReceiverStatus, oldest: Mapping[str, int | None], fault: str | None, now: int
) -> dict[str, Any]:
    """A receiver's deliveries. `held` are its pending ones while it is on hold; `oldest_seconds`: how long the oldest
    that is neither taken nor given up waits; `fault`: the drill switch that is on; `now` in UTC ms."""
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
        "held_since": iso(status.held_since),
        "reason": status.reason,
        "fault": fault,
        "oldest_seconds": _age(min(waiting), now) if waiting else None,
        "oldest_dead_seconds": _age(oldest.get(DEAD), now),
        "last_progress": iso(status.last_progress),
    }


def _rebuild_document(rebuild: Rebuild) -> dict[str, Any]:
    return {
        "rebuild": rebuild.rebuild_id,
        "phase": rebuild.phase,
        "generation": rebuild.generation,
        "expected": rebuild.expected,
        "replayed": rebuild.replayed,
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


def _totals(connection: Connection, generation: str) -> dict[str, Any]:
    return {
        currency: {"orders": orders, "amount": amount}
        for currency, (orders, amount) in sales_by_currency(connection, generation).items()
    }


def _age(since: int | None, now: int) -> float | None:
    return None if since is None else round(max(0, now - since) / 1000, 1)

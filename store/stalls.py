"""Backlogs: what waits at each stage, since when, and for what. A stall is a backlog without progress for a while.

Times are those of our own rows: an event is as old as its fan-out at a receiver, its push in Redis, and its order or
job in the outbox.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.names import FAN_OUT_ID, RELAY_ID
from store.clock import iso
from store.control import read_control
from store.deliveries import DEAD, PENDING, RETRYING, first_next
from store.dialect import by_index
from store.receivers import current_receivers, get_hold, last_progress
from store.schema import deliveries, jobs, orders, outbox

STALL_MS = 60_000
# Each with its partial index: left to itself SQLite walks over all that the receiver has ever done.
_PENDING_ROWS = ("deliveries.status = 'pending'", "deliveries_pending")
_RETRYING_ROWS = ("deliveries.status = 'retrying'", "deliveries_due")
_DEAD_ROWS = ("deliveries.status IN ('dead', 'waived') AND deliveries.status = 'dead'", "deliveries_set_aside")


@dataclass(frozen=True)
class Backlog:
    """The oldest event that waits at a stage (`relay`, `fan-out` or a receiver's name): its id, since when (UTC ms, or
    None where no row tells), what it waits for, and when the stage last moved something (UTC ms, or None)."""

    stage: str
    event_id: str
    since: int | None
    waits_for: str
    progress: int | None
    can_go_on: bool = False

    def stalled(self, now: int) -> bool:
        """Whether it has waited for a minute, and nothing moved for as long."""
        last = max(self.since or 0, self.progress or 0)
        return 0 < last <= now - STALL_MS

    def sentence(self) -> str:
        """What waits where, since when, and for what."""
        since = f" since {iso(self.since)}" if self.since else ""
        return f"{self.event_id} waits at {self.stage}{since} for {self.waits_for}"


def backlogs(connection: Connection, now: int) -> list[Backlog]:
    """The oldest of each stage that has any; `now` in UTC ms."""
    found = [relay_backlog(connection, now), fan_out_backlog(connection)]
    found += [receiver_backlog(connection, name) for name in current_receivers(connection)]
    return [each for each in found if each is not None]


def relay_backlog(connection: Connection, now: int) -> Backlog | None:
    """The first event that the relay has not pushed."""
    row = connection.execute(
        sa.select(outbox.c.event_id, outbox.c.event_type, outbox.c.aggregate_id)
        .where(sa.text("outbox.status = 'PENDING'"))
        .order_by(outbox.c.position)
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    event_id, event_type, aggregate_id = row
    name = aggregate_id.partition("/")[2]
    known = (orders.c.placed_at, orders.c.id) if event_type == ORDER_PLACED else (jobs.c.created_at, jobs.c.job_id)
    since = connection.execute(sa.select(known[0]).where(known[1] == name)).scalar_one_or_none()
    # Whoever drains says so again every few seconds.
    lease = read_control(connection).hot_until
    what = "the relay, which drains" if lease > now else "the relay, which does not drain (is Redis or a worker away?)"
    return Backlog(RELAY_ID, event_id, since, what, lease or None)


def fan_out_backlog(connection: Connection) -> Backlog | None:
    """The event that was pushed first of those that have no deliveries."""
    row = connection.execute(
        sa.select(outbox.c.event_id, outbox.c.published_at, outbox.c.position)
        .where(sa.text("outbox.status = 'PUBLISHED' AND outbox.fanned_out_at IS NULL"))
        .order_by(outbox.c.published_at)
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    # Events go through in about the order of their positions, so the one before tells when the last one did.
    progress = connection.execute(
        sa.select(outbox.c.fanned_out_at).where(outbox.c.position < row[2]).order_by(outbox.c.position.desc()).limit(1)
    ).scalar_one_or_none()
    return Backlog(FAN_OUT_ID, row[0], row[1], "the fan-out (is Redis or a worker away?)", progress)


def receiver_backlog(connection: Connection, receiver: str) -> Backlog | None:
    """The receiver's oldest event that is not settled and whose turn it is, or else the oldest of those behind it."""
    progress = last_progress(connection, receiver) or None
    position = first_next(connection, receiver)
    if position is not None:
        row = connection.execute(_rows().where(deliveries.c.receiver == receiver, outbox.c.position == position)).one()
        hold = get_hold(connection, receiver)
        if hold is None:
            what = "its turn at the receiver (is a worker away?)"
        else:
            what = f"{receiver} to be available again; it is on hold since {iso(hold.since)}: {hold.reason}"
        return Backlog(receiver, row[0], row[1], what, progress, can_go_on=True)
    row = _first(connection, receiver, _RETRYING_ROWS)
    if row is not None:
        tried = f"attempt {row[3] + 1}, due {iso(row[4])}; the last one failed: {row[5]}"
        return Backlog(receiver, row[0], row[1], tried, progress)
    row = _first(connection, receiver, _PENDING_ROWS)
    if row is None:
        return None
    before = connection.execute(
        sa.select(outbox.c.event_id, deliveries.c.status)
        .join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
        .where(
            deliveries.c.receiver == receiver,
            deliveries.c.aggregate_id == row[2],
            sa.text("deliveries.status IN ('retrying', 'dead')"),
        )
        .order_by(deliveries.c.seq)
        .limit(1)
    ).one_or_none()
    what = f"{before[0]}, which is {before[1]}; redrive or waive it" if before else "an earlier event of its order"
    return Backlog(receiver, row[0], row[1], what, progress)


def oldest_by_state(connection: Connection, receiver: str) -> dict[str, int | None]:
    """State -> since when (UTC ms) the first of the receiver's events has its delivery, for `pending`, `retrying` and
    `dead`; states in use only."""
    found: dict[str, int | None] = {}
    for state, rows in ((PENDING, _PENDING_ROWS), (RETRYING, _RETRYING_ROWS), (DEAD, _DEAD_ROWS)):
        row = _first(connection, receiver, rows)
        if row is not None:
            found[state] = row[1]
    return found


def _first(connection: Connection, receiver: str, rows: tuple[str, str]) -> Any:
    """Of the lowest position, or None."""
    condition, index = rows
    statement = (
        _rows().where(deliveries.c.receiver == receiver, sa.text(condition)).order_by(deliveries.c.position).limit(1)
    )
    return connection.execute(by_index(statement, deliveries, index)).one_or_none()


def _rows() -> sa.Select[Any]:
    """(event id, fanned out at, aggregate, attempts, next attempt at, last error) of deliveries."""
    return sa.select(
        outbox.c.event_id,
        # One that was published again is not fanned out just now, and was pushed when it says.
        sa.func.coalesce(outbox.c.fanned_out_at, outbox.c.first_published_at),
        deliveries.c.aggregate_id,
        deliveries.c.attempts,
        deliveries.c.next_attempt_at,
        deliveries.c.last_error,
    ).join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)

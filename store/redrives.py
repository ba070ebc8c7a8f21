"""Redrives: a frozen set of dead letters becomes pending again, in chunks that each are one short transaction.

The set is fixed in the transaction that asks for it, and each item is taken once, also if it dies again meanwhile, so a
redrive ends. A `RUNNING` one is read by its run (`take_chunk`), and by the look, which starts a run that was lost
(`redrives_due`). Order is kept by the rule of deliveries.py: events become pending in the order that they happened, and
a later event of an aggregate never passes a dead or pending one.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, NotFound, Refused
from contracts.identifiers import require_id
from contracts.names import REDRIVE_CANCELLED as CANCELLED
from contracts.names import REDRIVE_COMPLETED as COMPLETED
from contracts.names import REDRIVE_RUNNING as RUNNING
from store.clock import iso
from store.dead_letters import DeadFilter, Waiver, matching, resolve, waivers
from store.deliveries import PENDING
from store.dialect import for_update, insert, pack, value_list
from store.receivers import lock_receiver
from store.schema import deliveries, redrive_items, redrives


@dataclass(frozen=True)
class Redrive:
    """A request and how far it is: of `total` items `taken` became pending again, and `skipped` were no dead letters
    any more. `filters`: what narrowed it, as it was said. Times: UTC ms. `note`: why it was cancelled."""

    request_id: str
    filters: dict[str, str]
    state: str
    total: int
    taken: int
    skipped: int
    note: str | None
    created_at: int
    ended_at: int | None

    @property
    def left(self) -> int:
        """Items that were not taken yet."""
        return self.total - self.taken - self.skipped


@dataclass(frozen=True)
class Chunk:
    """What one transaction did: the redrive as it stands, the items it dealt with, the receivers that have work now."""

    redrive: Redrive
    items: int
    receivers: tuple[str, ...]


_REDRIVE = (
    redrives.c.request_id,
    redrives.c.filters,
    redrives.c.state,
    redrives.c.total,
    redrives.c.taken,
    redrives.c.skipped,
    redrives.c.note,
    redrives.c.created_at,
    redrives.c.ended_at,
)


def freeze_redrive(
    connection: Connection, request_id: str, filters: DeadFilter, now: int, look_at: int
) -> tuple[Redrive, bool]:
    """Write the request and its items, all of one instant; (the redrive, whether this call made it).

    `look_at` (UTC ms): when the look first makes sure that it has a run. The same request with the same filters again
    is answered with the first, and freezes nothing. Raises InvalidInput, NotFound, Conflict for other filters, Refused
    when the event that is named was waived.
    """
    require_id(request_id, "request")
    filters = resolve(connection, filters)
    said = _said(filters)
    made = connection.execute(
        insert(connection, redrives)
        .values(
            request_id=request_id,
            filters=said,
            state=RUNNING,
            total=0,
            taken=0,
            skipped=0,
            created_at=now,
            look_at=look_at,
        )
        .on_conflict_do_nothing()
        .returning(redrives.c.request_id)
    ).one_or_none()
    if made is None:
        first = get_redrive(connection, request_id)
        if first.filters != json.loads(said):
            raise Conflict(
                f"redrive {request_id} was asked for at {iso(first.created_at)} with {_shown(first.filters)}; "
                "nothing was changed, and another request id makes a new one"
            )
        return first, False
    items = matching(
        connection, filters, sa.literal(request_id), deliveries.c.position, deliveries.c.receiver, sa.literal(0)
    )
    connection.execute(sa.insert(redrive_items).from_select(["request_id", "position", "receiver", "skipped"], items))
    total = connection.execute(
        sa.select(sa.func.count()).select_from(redrive_items).where(redrive_items.c.request_id == request_id)
    ).scalar_one()
    if not total:
        refuse_waived(connection, filters)
    state = {"total": total} if total else {"state": COMPLETED, "ended_at": now}
    connection.execute(sa.update(redrives).where(redrives.c.request_id == request_id).values(state))
    return get_redrive(connection, request_id), True


def refuse_waived(connection: Connection, filters: DeadFilter) -> None:
    """Raises Refused when the resolved filter names an event that was waived: it stays out, and the reason is told."""
    if filters.event is None:
        return
    for letter in waivers(connection, DeadFilter(filters.receiver, filters.event)):
        waiver = Waiver(
            letter.receiver,
            letter.event_id,
            letter.aggregate_id,
            letter.reason or "",
            letter.settled_by or "",
            letter.settled_at or 0,
            created=False,
        )
        raise Refused(f"{waiver.sentence()}; a waived event is not redriven")


def get_redrive(connection: Connection, request_id: str) -> Redrive:
    """The redrive as it stands. Raises NotFound."""
    return _one(connection, sa.select(*_REDRIVE).where(redrives.c.request_id == request_id), request_id)


def take_chunk(connection: Connection, request_id: str, limit: int, now: int) -> Chunk:
    """Make the next `limit` items pending again, attempts from zero; completes the redrive with the last of them.

    The last error stays to be read until the next outcome. An item that is no dead letter any more (waived, or taken
    by another redrive) is skipped. Called after the end it changes nothing. Raises NotFound.
    """
    statement = sa.select(*_REDRIVE).where(redrives.c.request_id == request_id)
    redrive = _one(connection, for_update(connection, statement), request_id)
    if redrive.state != RUNNING:
        return Chunk(redrive, 0, ())
    by_receiver: dict[str, list[int]] = defaultdict(list)
    for receiver, position in connection.execute(
        sa.select(redrive_items.c.receiver, redrive_items.c.position)
        .where(redrive_items.c.request_id == request_id, sa.text("redrive_items.taken_at IS NULL"))
        .order_by(redrive_items.c.position, redrive_items.c.receiver)
        .limit(limit)
    ):
        by_receiver[receiver].append(position)
    taken, woken = 0, []
    # In one order everywhere, so that two redrives cannot wait for each other.
    for receiver, positions in sorted(by_receiver.items()):
        lock_receiver(connection, receiver)
        revived = _revive(connection, receiver, positions)
        _settle(connection, request_id, receiver, positions, revived, now)
        taken += len(revived)
        if revived:
            woken.append(receiver)
    items = sum(len(positions) for positions in by_receiver.values())
    ended = {"state": COMPLETED, "ended_at": now} if redrive.left <= items else {}
    connection.execute(
        sa.update(redrives)
        .where(redrives.c.request_id == request_id)
        .values(taken=redrives.c.taken + taken, skipped=redrives.c.skipped + items - taken, **ended)
    )
    return Chunk(get_redrive(connection, request_id), items, tuple(woken))


def cancel_redrive(connection: Connection, request_id: str, note: str, now: int) -> Redrive:
    """End a running one where it stands: what was taken stays pending, the rest stays dead. Raises NotFound."""
    connection.execute(
        sa.update(redrives)
        .where(redrives.c.request_id == request_id, redrives.c.state == RUNNING)
        .values(state=CANCELLED, note=note, ended_at=now)
    )
    return get_redrive(connection, request_id)


def redrives_due(connection: Connection, now: int, limit: int) -> list[Redrive]:
    """Running ones that the look is to find a run for, oldest first."""
    rows = connection.execute(
        sa.select(*_REDRIVE)
        .where(sa.text("redrives.state = 'RUNNING'"), redrives.c.look_at <= now)
        .order_by(redrives.c.look_at)
        .limit(limit)
    )
    return [_redrive(row) for row in rows]


def postpone_redrive_look(connection: Connection, request_id: str, look_at: int) -> None:
    """It has a run; look again at `look_at` (UTC ms)."""
    connection.execute(sa.update(redrives).where(redrives.c.request_id == request_id).values(look_at=look_at))


def _revive(connection: Connection, receiver: str, positions: list[int]) -> set[int]:
    chosen = value_list(connection, "positions", int)
    return set(
        connection.execute(
            sa.update(deliveries)
            .where(
                deliveries.c.receiver == receiver,
                deliveries.c.position.in_(sa.select(chosen.c.value)),
                sa.text("deliveries.status = 'dead'"),
            )
            .values(status=PENDING, attempts=0, next_attempt_at=None, has_run=0, settled_at=None)
            .returning(deliveries.c.position),
            {"positions": pack(connection, positions)},
        ).scalars()
    )


def _settle(
    connection: Connection, request_id: str, receiver: str, positions: list[int], revived: set[int], now: int
) -> None:
    chosen = value_list(connection, "positions", int)
    for skipped, group in ((0, revived), (1, set(positions) - revived)):
        if group:
            connection.execute(
                sa.update(redrive_items)
                .where(
                    redrive_items.c.request_id == request_id,
                    redrive_items.c.receiver == receiver,
                    redrive_items.c.position.in_(sa.select(chosen.c.value)),
                )
                .values(taken_at=now, skipped=skipped),
                {"positions": pack(connection, sorted(group))},
            )


def _one(connection: Connection, statement: sa.Select[Any], request_id: str) -> Redrive:
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise NotFound(f"there is no redrive {request_id}; `dead redrive` makes one")
    return _redrive(row)


def _redrive(row: Any) -> Redrive:
    return Redrive(row[0], json.loads(row[1]), *row[2:])


def _said(filters: DeadFilter) -> str:
    """One text for equal filters."""
    since = filters.since_said or iso(filters.since)
    said = {
        "receiver": filters.receiver,
        "event": filters.event,
        "aggregate": filters.aggregate,
        "error": filters.error,
        "since": since,
    }
    return json.dumps({name: value for name, value in said.items() if value is not None}, sort_keys=True)


def _shown(filters: dict[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in filters.items()) or "no filter"

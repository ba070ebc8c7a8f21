"""Fan-out: entries of the Redis list become one delivery for each receiver that takes the event's type."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from store.dialect import Rendered, insert, pack, storable, value_list
from store.schema import deliveries, invalid_entries, outbox, subscriptions

_MAX_SHOWN = 600  # characters of at most 4 bytes: PostgreSQL indexes 2,704


@dataclass(frozen=True)
class FannedOut:
    """What one batch of entries came to: events fanned out now, duplicates dropped, entries that are no events.

    `event_ids`: the entries that are events, each once. `deliveries`: how many were registered for them.
    """

    events: int
    duplicates: int
    invalid: int
    event_ids: tuple[str, ...] = field(default=(), compare=False)
    deliveries: int = field(default=0, compare=False)


def fan_out(connection: Connection, entries: Sequence[bytes], now: int) -> FannedOut:
    """Register the deliveries of `entries` (event ids in UTF-8, repeats allowed); `now` in UTC ms.

    Also registers every event of the same aggregates with a lower `seq` that is not fanned out yet, so that an
    aggregate never has a gap in `deliveries` and no receiver sees its events out of order. A delivery that is there
    keeps its state.
    """
    ids, junk = _decode(entries)
    known: set[str] = set()
    positions: set[int] = set()
    begun: set[str] = set()
    later: dict[str, set[int]] = {}
    for position, event_id, aggregate_id, seq, fanned_out_at in _NAMED.many(connection, pack(connection, ids)):
        known.add(event_id)
        if fanned_out_at is None:
            positions.add(position)
            if seq == 1:
                begun.add(aggregate_id)
            else:
                later.setdefault(aggregate_id, set()).add(seq)
    junk += [(event_id, "is no event in the outbox") for event_id in ids if event_id not in known]
    duplicates = len(entries) - len(positions) - len(junk)
    for aggregate_id, seqs in sorted(later.items()):
        top = max(seqs)
        if len(seqs) + (aggregate_id in begun) < top:  # else all of them are here, down to the first
            positions.update(row[0] for row in _EARLIER.rows(connection, aggregate_id, top, aggregate_id, top))
    registered = register_deliveries(connection, sorted(positions), now) if positions else 0
    if junk:
        _record_invalid(connection, junk, now)
    return FannedOut(len(positions), duplicates, len(junk), tuple(known), registered)


def _register(connection: Connection) -> Any:
    chosen = value_list(connection, "positions", int)
    return (
        insert(connection, deliveries)
        .from_select(
            ["receiver", "position", "aggregate_id", "seq", "status", "attempts", "has_run"],
            sa.select(
                subscriptions.c.receiver,
                outbox.c.position,
                outbox.c.aggregate_id,
                outbox.c.seq,
                sa.literal_column("'pending'"),
                sa.literal_column("0"),
                sa.literal_column("0"),
            )
            .select_from(subscriptions)
            .join(chosen, sa.true())
            .join(outbox, outbox.c.position == chosen.c.value)
            .where(
                outbox.c.event_type == subscriptions.c.event_type,
                outbox.c.position > subscriptions.c.since_position,
            )
            # In one order everywhere, so that twins cannot wait for each other; that of the key is the cheapest.
            .order_by(subscriptions.c.receiver, outbox.c.position),
        )
        .on_conflict_do_nothing()
    )


def _mark_fanned_out(connection: Connection) -> Any:
    chosen = value_list(connection, "positions", int)
    return (
        sa.update(outbox)
        .where(outbox.c.position.in_(sa.select(chosen.c.value)))
        .values(fanned_out_at=sa.bindparam("now", type_=sa.BigInteger))
    )


_REGISTER = Rendered(_register, "positions")
_MARK_FANNED_OUT = Rendered(_mark_fanned_out, "now", "positions")


def register_deliveries(connection: Connection, positions: Sequence[int], now: int) -> int:
    """One delivery a receiver that takes the type, for each of these events; then they count as fanned out. How many
    deliveries are new."""
    chosen = pack(connection, positions)
    registered = _REGISTER.count(connection, chosen)
    _MARK_FANNED_OUT.count(connection, now, chosen)
    return registered


def _decode(entries: Sequence[bytes]) -> tuple[list[str], list[tuple[str, str]]]:
    ids: dict[str, None] = {}
    junk: dict[str, str] = {}
    for entry in entries:
        try:
            text = entry.decode()
        except UnicodeDecodeError:
            junk[entry.decode(errors="backslashreplace")] = "is not UTF-8 text"
            continue
        if "\0" in text:
            junk[text] = "holds a NUL character"  # PostgreSQL stores none
        else:
            ids[text] = None
    return list(ids), list(junk.items())


def _named(connection: Connection) -> Any:
    wanted = value_list(connection, "ids", str)
    return sa.select(
        outbox.c.position,
        outbox.c.event_id,
        outbox.c.aggregate_id,
        outbox.c.seq,
        outbox.c.fanned_out_at,
    ).join_from(wanted, outbox, outbox.c.event_id == wanted.c.value)


def _earlier_unregistered(_: Connection) -> Any:
    """Events of the aggregate below `top`, down to the last one that was fanned out."""
    aggregate_id = sa.bindparam("aggregate_id", type_=sa.Text)
    top = sa.bindparam("top", type_=sa.Integer)
    last_done = (
        sa.select(sa.func.max(outbox.c.seq))
        .where(outbox.c.aggregate_id == aggregate_id, outbox.c.seq < top, outbox.c.fanned_out_at.is_not(None))
        .scalar_subquery()
    )
    return sa.select(outbox.c.position).where(
        outbox.c.aggregate_id == aggregate_id,
        outbox.c.seq < top,
        outbox.c.seq > sa.func.coalesce(last_done, sa.literal_column("0")),
    )


_NAMED = Rendered(_named, "ids")
_EARLIER = Rendered(_earlier_unregistered, "aggregate_id", "top", "aggregate_id", "top")


def _record_invalid(connection: Connection, junk: Sequence[tuple[str, str]], now: int) -> None:
    shown = {storable(entry, _MAX_SHOWN): reason for entry, reason in junk}
    connection.execute(
        insert(connection, invalid_entries).on_conflict_do_nothing(),
        [{"entry": entry, "reason": reason, "seen_at": now} for entry, reason in shown.items()],
    )

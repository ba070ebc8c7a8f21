"""The rebuild's writes: each is one short transaction, safe to repeat, and refuses to act once the rebuild is over.

The expected set comes from `orders`, the replay from `outbox`: two sources, so that comparing them means something.
Replay writes only to the generation that is BUILDING; nothing here touches the one that was active, until `activate`
swaps both in one transaction.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import NotFound, Refused
from contracts.events import ORDER_PLACED
from store.control import pause_intake, read_control
from store.dialect import for_update, insert, lock_intake
from store.effects import add_to_totals, apply_from_outbox
from store.generations import ACTIVE, BUILDING, FAILED, RETIRED, SEALED, move, rollback_target
from store.schema import (
    OPEN,
    PAUSED,
    control,
    generations,
    orders,
    outbox,
    rebuild_expected,
    rebuilds,
    sales_applied,
)

RUNNING, COMPLETED = "RUNNING", "COMPLETED"
REBUILD, ROLLBACK = "rebuild", "rollback"
# What a rebuild does, in the order of the saga: for people, who read it in `execution`.
PHASES = (
    DRAINING := "waiting until drained",
    FIXING := "fixing the expected set",
    REPLAYING := "replaying",
    RECONCILING := "reconciling",
    PROVING := "reconciling the sealed generation",
    ACTIVATING := "activating",
    ACTIVATED := "activated",
)


@dataclass(frozen=True)
class Rebuild:
    """One rebuild or rollback as its row says. Times: UTC ms or None."""

    rebuild_id: str
    kind: str
    state: str
    phase: str
    generation: str
    base_generation: str
    epoch: int
    resume: bool
    until_position: int | None
    expected: int
    replayed: int
    certificate: str | None
    error: str | None
    started_at: int
    ended_at: int | None


_COLUMNS = (
    rebuilds.c.rebuild_id,
    rebuilds.c.kind,
    rebuilds.c.state,
    rebuilds.c.phase,
    rebuilds.c.generation,
    rebuilds.c.base_generation,
    rebuilds.c.epoch,
    rebuilds.c.resume,
    rebuilds.c.until_position,
    rebuilds.c.expected,
    rebuilds.c.replayed,
    rebuilds.c.certificate,
    rebuilds.c.error,
    rebuilds.c.started_at,
    rebuilds.c.ended_at,
)


def _rebuild(row: sa.Row[Any]) -> Rebuild:
    values = dict(row._mapping)
    return Rebuild(**{**values, "resume": bool(values["resume"])})


def get_rebuild(connection: Connection, rebuild_id: str) -> Rebuild:
    """The rebuild of that id. Raises NotFound."""
    return _found(connection, sa.select(*_COLUMNS).where(rebuilds.c.rebuild_id == rebuild_id), rebuild_id)


def _lock_rebuild(connection: Connection, rebuild_id: str) -> Rebuild:
    """The rebuild, which nobody else ends or carries on until this transaction ends. Raises NotFound."""
    statement = sa.select(*_COLUMNS).where(rebuilds.c.rebuild_id == rebuild_id)
    return _found(connection, for_update(connection, statement), rebuild_id)


def _found(connection: Connection, statement: sa.Select[Any], rebuild_id: str) -> Rebuild:
    row: Any = connection.execute(statement).one_or_none()
    if row is None:
        raise NotFound(f"there is no rebuild {rebuild_id}")
    return _rebuild(row)


def rebuild_of_run(connection: Connection, run_id: str) -> Rebuild | None:
    """The rebuild that this run began, or None before it did."""
    row: Any = connection.execute(sa.select(*_COLUMNS).where(rebuilds.c.run_id == run_id)).one_or_none()
    return None if row is None else _rebuild(row)


def last_rebuild(connection: Connection) -> Rebuild | None:
    """The one that runs, else the one that began last, or None."""
    row: Any = connection.execute(
        sa.select(*_COLUMNS).order_by(sa.text("state = 'RUNNING' DESC"), rebuilds.c.epoch.desc()).limit(1)
    ).first()
    return None if row is None else _rebuild(row)


def running_rebuild(connection: Connection) -> Rebuild | None:
    """The one that runs, or None."""
    row: Any = connection.execute(sa.select(*_COLUMNS).where(sa.text("state = 'RUNNING'"))).one_or_none()
    return None if row is None else _rebuild(row)


def begin_rebuild(
    connection: Connection, run_id: str, *, kind: str, target: str | None, resume: bool, now: int
) -> Rebuild:
    """Pause intake in the name of this rebuild and record it; the same `run_id` again finds what it began.

    Raises Refused while another one runs, or when there is nothing to roll back to.
    """
    lock_intake(connection, exclusive=True)
    row: Any = connection.execute(sa.select(*_COLUMNS).where(rebuilds.c.run_id == run_id)).one_or_none()
    if row is not None:
        return _rebuild(row)
    other = running_rebuild(connection)
    if other is not None:
        raise Refused(f"{other.rebuild_id} runs already; wait for it, or cancel it")
    number = connection.execute(sa.select(sa.func.count()).select_from(rebuilds)).scalar_one() + 1
    generation = rollback_target(connection, target) if kind == ROLLBACK else f"generation-{number}"
    base = read_control(connection).active_generation
    rebuild_id = f"{kind}-{number}"
    epoch = pause_intake(connection, rebuild_id)
    connection.execute(
        sa.insert(rebuilds).values(
            rebuild_id=rebuild_id,
            run_id=run_id,
            kind=kind,
            state=RUNNING,
            phase=DRAINING,
            generation=generation,
            base_generation=base,
            epoch=epoch,
            resume=int(resume),
            started_at=now,
        )
    )
    return get_rebuild(connection, rebuild_id)


def undrained(connection: Connection, limit: int) -> list[str]:
    """Event ids of `order-placed` events that have no deliveries yet, at most `limit`; empty means drained."""
    found: list[str] = []
    for condition in ("status = 'PENDING'", "status = 'PUBLISHED' AND fanned_out_at IS NULL"):
        found += connection.execute(
            sa.select(outbox.c.event_id).where(sa.text(condition), outbox.c.event_type == ORDER_PLACED).limit(limit)
        ).scalars()
    return found[:limit]


def fix_history(connection: Connection, rebuild_id: str, now: int) -> bool:
    """Whether the history is drained; if so it is fixed from here on, as long as intake stays paused, and the new
    generation exists."""
    rebuild = _require_running(connection, rebuild_id)
    if rebuild.until_position is not None:
        return True
    if undrained(connection, 1):
        return False
    last = connection.execute(sa.select(sa.func.coalesce(sa.func.max(outbox.c.position), 0))).scalar_one()
    if rebuild.kind == ROLLBACK:
        if not move(connection, rebuild.generation, RETIRED, BUILDING):
            raise Refused(f"generation {rebuild.generation} is not retired any more")
    else:
        connection.execute(sa.insert(generations).values(generation=rebuild.generation, state=BUILDING, created_at=now))
    _note(connection, rebuild_id, phase=FIXING, until_position=last)
    return True


def expect_chunk(connection: Connection, rebuild_id: str, after: str, limit: int) -> str | None:
    """Copy up to `limit` orders with ids above `after`, in binary order, into the expected set; the last id, or None
    when there are no more."""
    _require_running(connection, rebuild_id)
    above = sa.select(orders.c.id).where(orders.c.id > after).order_by(orders.c.id)
    # Two reads of the index of ids alone, so that the rows are read once.
    last: str | None = connection.execute(above.offset(limit - 1).limit(1)).scalar_one_or_none()
    if last is None:
        last = connection.execute(sa.select(sa.func.max(orders.c.id)).where(orders.c.id > after)).scalar_one()
    if last is None:
        return None
    added = connection.execute(
        insert(connection, rebuild_expected)
        .from_select(
            ["rebuild_id", "event_id", "amount", "currency"],
            sa.select(sa.literal(rebuild_id), orders.c.id + ":placed", orders.c.amount, orders.c.currency)
            .where(orders.c.id > after, orders.c.id <= last)
            .order_by(orders.c.id),
        )
        .on_conflict_do_nothing(),
        # Of an INSERT the driver's count is thrown away otherwise, and PostgreSQL's would read -1.
        execution_options={"preserve_rowcount": True},
    ).rowcount
    _note(connection, rebuild_id, expected=rebuilds.c.expected + added)
    return last


def replay_chunk(connection: Connection, rebuild_id: str, after: int, width: int) -> int | None:
    """Apply the events at positions in (after, after + width] that the generation lacks; the position reached, or
    None when the fixed history ends there. Raises Refused unless the generation is BUILDING."""
    rebuild = _require_running(connection, rebuild_id)
    if rebuild.until_position is None:
        raise Refused(f"{rebuild_id} has not fixed its history yet")
    if after >= rebuild.until_position:
        return None
    state = sa.select(generations.c.state).where(generations.c.generation == rebuild.generation)
    if connection.execute(for_update(connection, state, shared=True)).scalar_one_or_none() != BUILDING:
        raise Refused(f"generation {rebuild.generation} takes no writes any more")
    upto = min(after + width, rebuild.until_position)
    before = _window(connection, rebuild.generation, after, upto)
    window = sa.and_(outbox.c.position > after, outbox.c.position <= upto)
    connection.execute(apply_from_outbox(connection, sa.literal(rebuild.generation), window))
    added = 0
    for currency, (count, amount) in _window(connection, rebuild.generation, after, upto).items():
        old_count, old_amount = before.get(currency, (0, 0))
        if count > old_count:
            add_to_totals(connection, rebuild.generation, currency, count - old_count, amount - old_amount)
            added += count - old_count
    _note(connection, rebuild_id, replayed=rebuilds.c.replayed + added)
    return upto


def set_phase(connection: Connection, rebuild_id: str, phase: str) -> None:
    """What it does now, for people."""
    _require_running(connection, rebuild_id)
    _note(connection, rebuild_id, phase=phase)


def seal(connection: Connection, rebuild_id: str) -> None:
    """No write reaches the generation from here on; sealing it twice changes nothing."""
    rebuild = _require_running(connection, rebuild_id)
    if not move(connection, rebuild.generation, BUILDING, SEALED):
        state = connection.execute(
            sa.select(generations.c.state).where(generations.c.generation == rebuild.generation)
        ).scalar_one_or_none()
        if state != SEALED:
            raise Refused(f"generation {rebuild.generation} is {state}, not {BUILDING}")
    _note(connection, rebuild_id, phase=PROVING)


def store_certificate(connection: Connection, rebuild_id: str, certificate: str) -> None:
    """The proof, without which the database accepts no ACTIVE generation. Raises Refused unless it is SEALED."""
    rebuild = _require_running(connection, rebuild_id)
    changed = connection.execute(
        sa.update(generations)
        .where(generations.c.generation == rebuild.generation, generations.c.state == SEALED)
        .values(certificate=certificate)
    ).rowcount
    if changed != 1:
        raise Refused(f"generation {rebuild.generation} is not sealed, so it cannot be certified")
    _note(connection, rebuild_id, certificate=certificate, phase=ACTIVATING)


def activate(connection: Connection, rebuild_id: str, now: int) -> Rebuild:
    """Swap the generations: all conditions and all changes in this one transaction, or nothing.

    Called again after it took effect it changes nothing. Raises Refused, naming the condition that does not hold.
    """
    lock_intake(connection, exclusive=True)
    rebuild = _lock_rebuild(connection, rebuild_id)
    if rebuild.state == COMPLETED:
        return rebuild
    rebuild = _require_running(connection, rebuild_id)
    state = read_control(connection)
    if (state.intake, state.paused_by) != (PAUSED, rebuild_id):
        raise Refused(f"intake is not paused by {rebuild_id} any more")
    if state.epoch != rebuild.epoch:
        raise Refused(f"intake was paused or resumed since {rebuild_id} began")
    if rebuild.certificate is None:
        raise Refused(f"generation {rebuild.generation} has no certificate")
    late = connection.execute(
        sa.select(outbox.c.event_id)
        .where(outbox.c.position > rebuild.until_position, outbox.c.event_type == ORDER_PLACED)
        .limit(1)
    ).scalar_one_or_none()
    if late is not None:
        raise Refused(f"event {late} was recorded after the history was fixed")
    if not move(connection, rebuild.base_generation, ACTIVE, RETIRED):
        raise Refused(f"generation {rebuild.base_generation} is not the active one any more")
    if not move(connection, rebuild.generation, SEALED, ACTIVE):
        raise Refused(f"generation {rebuild.generation} is not sealed")
    swapped = connection.execute(
        sa.update(control)
        .where(control.c.active_generation == rebuild.base_generation, control.c.epoch == rebuild.epoch)
        .values(
            active_generation=rebuild.generation,
            epoch=control.c.epoch + 1,
            **({"intake": OPEN, "paused_by": None} if rebuild.resume else {}),
        )
    ).rowcount
    if swapped != 1:
        raise Refused(f"generation {rebuild.base_generation} is not the active one any more")
    _note(connection, rebuild_id, state=COMPLETED, phase=ACTIVATED, ended_at=now)
    return get_rebuild(connection, rebuild_id)


def fail_rebuild(connection: Connection, rebuild_id: str, error: str, now: int) -> Rebuild:
    """End it without a switch; what the database says afterwards (COMPLETED if it had been activated before).

    Touches only a generation that is BUILDING or SEALED: a new one is FAILED, one that was to be rolled back to is
    RETIRED again. Intake stays paused.
    """
    lock_intake(connection, exclusive=True)
    rebuild = _lock_rebuild(connection, rebuild_id)
    if rebuild.state != RUNNING:
        return rebuild
    after = RETIRED if rebuild.kind == ROLLBACK else FAILED
    for before in (BUILDING, SEALED):
        move(connection, rebuild.generation, before, after)
    _note(connection, rebuild_id, state=FAILED, error=error, ended_at=now)
    return get_rebuild(connection, rebuild_id)


def forget_expected(connection: Connection, rebuild_id: str, limit: int) -> int:
    """Remove up to `limit` rows of the expected set of a rebuild that is over; how many went."""
    chosen = (
        sa.select(rebuild_expected.c.event_id)
        .where(rebuild_expected.c.rebuild_id == rebuild_id)
        .limit(limit)
        .scalar_subquery()
    )
    return connection.execute(
        sa.delete(rebuild_expected).where(
            rebuild_expected.c.rebuild_id == rebuild_id, rebuild_expected.c.event_id.in_(chosen)
        )
    ).rowcount


def leftover_expected(connection: Connection) -> str | None:
    """A rebuild that is over and still has its expected set, since its run was terminated or lost; or None."""
    left = sa.exists().where(rebuild_expected.c.rebuild_id == rebuilds.c.rebuild_id)
    rebuild_id: str | None = connection.execute(
        sa.select(rebuilds.c.rebuild_id).where(rebuilds.c.state != RUNNING, left).limit(1)
    ).scalar_one_or_none()
    return rebuild_id


def _require_running(connection: Connection, rebuild_id: str) -> Rebuild:
    # Locked: a step that only read RUNNING could commit after the end, and leave a generation that nobody cleans up.
    rebuild = _lock_rebuild(connection, rebuild_id)
    if rebuild.state != RUNNING:
        raise Refused(f"{rebuild_id} is over: {rebuild.state}" + (f", {rebuild.error}" if rebuild.error else ""))
    return rebuild


def _note(connection: Connection, rebuild_id: str, **values: object) -> None:
    connection.execute(sa.update(rebuilds).where(rebuilds.c.rebuild_id == rebuild_id).values(**values))


def _window(connection: Connection, generation: str, after: int, upto: int) -> dict[str, tuple[int, int]]:
    rows = connection.execute(
        sa.select(sales_applied.c.currency, sa.func.count(), sa.func.sum(sales_applied.c.amount))
        .where(
            sales_applied.c.generation == generation,
            sales_applied.c.position > after,
            sales_applied.c.position <= upto,
        )
        .group_by(sales_applied.c.currency)
    )
    return {row[0]: (row[1], int(row[2])) for row in rows}

"""Generations: complete copies of the sales totals. BUILDING -> SEALED -> ACTIVE -> RETIRED, or FAILED."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import NotFound, Refused
from store.schema import generations, rebuilds, sales_applied, sales_totals

BUILDING, SEALED, ACTIVE, RETIRED, FAILED = "BUILDING", "SEALED", "ACTIVE", "RETIRED", "FAILED"


@dataclass(frozen=True)
class Generation:
    """One generation. `totals`: currency -> (orders, amount); `created_at`: UTC ms; `certificate`: JSON text."""

    generation: str
    state: str
    certificate: str | None
    created_at: int
    totals: dict[str, tuple[int, int]]


def list_generations(connection: Connection) -> list[Generation]:
    """All, oldest first."""
    totals: dict[str, dict[str, tuple[int, int]]] = {}
    for generation, currency, orders, amount in connection.execute(
        sa.select(
            sales_totals.c.generation, sales_totals.c.currency, sales_totals.c.orders, sales_totals.c.amount
        ).order_by(sales_totals.c.currency)
    ):
        totals.setdefault(generation, {})[currency] = (orders, amount)
    rows = connection.execute(
        sa.select(
            generations.c.generation, generations.c.state, generations.c.certificate, generations.c.created_at
        ).order_by(generations.c.created_at, generations.c.generation)
    )
    return [Generation(*row, totals=totals.get(row[0], {})) for row in rows]


def state_of(connection: Connection, generation: str) -> str:
    """Its state. Raises NotFound."""
    state: str | None = connection.execute(
        sa.select(generations.c.state).where(generations.c.generation == generation)
    ).scalar_one_or_none()
    if state is None and _was_dropped(connection, generation):
        raise NotFound(f"generation {generation} was dropped; `generations list` names those that there are")
    if state is None:
        raise NotFound(f"there is no generation {generation}; `generations list` names them")
    return state


def rollback_target(connection: Connection, generation: str | None) -> str:
    """The retired generation to go back to: the one named, else the one that was active last.

    Raises NotFound, or Refused when it is not retired.
    """
    if generation is not None:
        state = state_of(connection, generation)
        if state != RETIRED:
            raise Refused(f"generation {generation} is {state}; only a RETIRED one can be rolled back to")
        return generation
    # By epoch, which only grows: the one created last need not be the one that was active last.
    found: str | None = connection.execute(
        sa.select(generations.c.generation)
        .join_from(rebuilds, generations, generations.c.generation == rebuilds.c.base_generation)
        .where(generations.c.state == RETIRED, rebuilds.c.state == "COMPLETED")
        .order_by(rebuilds.c.epoch.desc())
        .limit(1)
    ).scalar_one_or_none()
    if found is None:
        raise Refused("there is no retired generation to roll back to")
    return found


def move(connection: Connection, generation: str, before: str, after: str) -> bool:
    """Change its state if it is `before`; whether it was. The only way by which a state changes."""
    return (
        connection.execute(
            sa.update(generations)
            .where(generations.c.generation == generation, generations.c.state == before)
            .values(state=after)
        ).rowcount
        == 1
    )


def count_rows(connection: Connection, generation: str) -> int:
    """How many events the generation holds."""
    return connection.execute(
        sa.select(sa.func.count()).select_from(sales_applied).where(sales_applied.c.generation == generation)
    ).scalar_one()


def begin_drop(connection: Connection, generation: str) -> bool:
    """Nothing may come back to it from here on; False when it is dropped already. Raises NotFound for one that there
    never was, Refused unless it is retired or failed."""
    # By what the move finds, not by what was read before: a rollback may take the generation in between.
    if not move(connection, generation, RETIRED, FAILED) and not move(connection, generation, FAILED, FAILED):
        if _was_dropped(connection, generation):
            return False
        state = state_of(connection, generation)
        raise Refused(f"generation {generation} is {state}; only RETIRED and FAILED ones can be dropped")
    connection.execute(sa.delete(sales_totals).where(sales_totals.c.generation == generation))
    return True


def _was_dropped(connection: Connection, generation: str) -> bool:
    """Whether it was there once and is gone: the rebuilds that made it or went on from it stay on record."""
    there = sa.exists().where(generations.c.generation == generation)
    known = sa.exists().where(sa.or_(rebuilds.c.generation == generation, rebuilds.c.base_generation == generation))
    return bool(connection.execute(sa.select(sa.and_(known, ~there))).scalar_one())


def drop_chunk(connection: Connection, generation: str, limit: int) -> int:
    """Remove up to `limit` of its rows, and the generation itself with the last of them; how many rows went.

    Raises Refused unless `begin_drop` came first. One that is gone already has nothing to remove.
    """
    state = connection.execute(
        sa.select(generations.c.state).where(generations.c.generation == generation)
    ).scalar_one_or_none()
    if state not in (FAILED, None):  # FAILED is for ever
        raise Refused(f"generation {generation} is {state}, and its rows are in use")
    chosen = (
        sa.select(sales_applied.c.position)
        .where(sales_applied.c.generation == generation)
        .order_by(sales_applied.c.position)
        .limit(limit)
        .scalar_subquery()
    )
    removed = connection.execute(
        sa.delete(sales_applied).where(sales_applied.c.generation == generation, sales_applied.c.position.in_(chosen))
    ).rowcount
    if removed < limit:
        connection.execute(
            sa.delete(generations).where(generations.c.generation == generation, generations.c.state == FAILED)
        )
    return removed

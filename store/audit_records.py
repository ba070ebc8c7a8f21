"""What is on record beside the flow: every row has a reason to be there, and whoever is to find it finds it."""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.names import REDRIVE_COMPLETED, REDRIVE_RUNNING
from store.audit_findings import NAMED, UNFINISHED, Audit, Break, Check
from store.audit_sales import totals_off
from store.deliveries import RETRYING, WAIVED
from store.generations import BUILDING, FAILED, SEALED
from store.rebuild import COMPLETED, RUNNING
from store.schema import (
    INITIAL,
    PAUSED,
    control,
    deliveries,
    generations,
    outbox,
    rebuild_expected,
    rebuilds,
    receivers,
    redrive_items,
    redrives,
    sales_applied,
    sales_totals,
    subscriptions,
)


def _of_deliveries() -> Iterable[tuple[str, str, sa.Select[Any]]]:
    delivery = sa.select(outbox.c.event_id).join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
    return (
        (
            "I2",
            "receivers that are subscribed and not registered: nobody drains them",
            sa.select(subscriptions.c.receiver)
            .distinct()
            .where(~sa.exists().select_from(receivers).where(receivers.c.receiver == subscriptions.c.receiver)),
        ),
        (
            "I2",
            "events in Redis of no known push: nobody would find them lost",
            sa.select(outbox.c.event_id).where(
                sa.text("status = 'PUBLISHED' AND fanned_out_at IS NULL"), outbox.c.published_at.is_(None)
            ),
        ),
        (
            "I2",
            f"events {RETRYING} without a time of their next attempt: nobody would find their run lost",
            delivery.where(sa.text(UNFINISHED[RETRYING]), deliveries.c.next_attempt_at.is_(None)),
        ),
        (
            "I2",
            f"events {WAIVED} without who did it, when and why",
            delivery.where(
                sa.text(UNFINISHED[WAIVED]),
                sa.or_(
                    deliveries.c.reason.is_(None), deliveries.c.settled_by.is_(None), deliveries.c.settled_at.is_(None)
                ),
            ),
        ),
    )


def _of_redrives() -> Iterable[tuple[str, str, sa.Select[Any]]]:
    counted = (
        sa.select(
            redrive_items.c.request_id,
            sa.func.count().label("total"),
            sa.func.count(
                sa.case((sa.and_(redrive_items.c.taken_at.is_not(None), redrive_items.c.skipped == 0), 1))
            ).label("taken"),
            sa.func.count(sa.case((redrive_items.c.skipped == 1, 1))).label("skipped"),
        )
        .group_by(redrive_items.c.request_id)
        .subquery()
    )
    left = redrives.c.total - redrives.c.taken - redrives.c.skipped
    return (
        (
            "I2",
            "redrives whose counts are not those of their items",
            sa.select(redrives.c.request_id)
            .join_from(redrives, counted, counted.c.request_id == redrives.c.request_id, isouter=True)
            .where(
                sa.or_(
                    *(
                        redrives.c[name] != sa.func.coalesce(counted.c[name], 0)
                        for name in ("total", "taken", "skipped")
                    )
                )
            ),
        ),
        (
            "I2",
            "redrives that have ended with items left, or not ended with none",
            sa.select(redrives.c.request_id).where(
                sa.or_(
                    sa.and_(redrives.c.state == REDRIVE_RUNNING, left == 0),
                    sa.and_(redrives.c.state == REDRIVE_COMPLETED, left > 0),
                )
            ),
        ),
        (
            "I2",
            "items of no redrive",
            sa.select(counted.c.request_id).where(
                ~sa.exists().select_from(redrives).where(redrives.c.request_id == counted.c.request_id)
            ),
        ),
    )


def _of_rebuilds() -> Iterable[tuple[str, str, sa.Select[Any]]]:
    running = sa.select(rebuilds.c.rebuild_id).where(sa.text("rebuilds.state = 'RUNNING'"))
    of = rebuilds.alias()
    return (
        (
            "I6",
            f"rebuilds {RUNNING} without intake paused in their name since",
            running.where(
                ~sa.exists()
                .select_from(control)
                .where(
                    control.c.intake == PAUSED,
                    control.c.paused_by == rebuilds.c.rebuild_id,
                    control.c.epoch == rebuilds.c.epoch,
                )
            ),
        ),
        (
            "I6",
            "generations being built by nobody",
            sa.select(generations.c.generation).where(
                generations.c.state.in_([BUILDING, SEALED]),
                ~sa.exists().select_from(of).where(of.c.state == RUNNING, of.c.generation == generations.c.generation),
            ),
        ),
        (
            "I6",
            "generations ACTIVE that no rebuild switched to",
            sa.select(generations.c.generation).where(
                sa.text("generations.state = 'ACTIVE'"),
                generations.c.generation != INITIAL,
                ~sa.exists()
                .select_from(of)
                .where(of.c.state == COMPLETED, of.c.generation == generations.c.generation),
            ),
        ),
    )


# Made once: making them anew takes longer than running them.
_CHECKS = tuple(Check(*check) for check in (*_of_deliveries(), *_of_redrives(), *_of_rebuilds()))


def check_records(connection: Connection, found: Audit) -> None:
    """Note what does not hold in `found`: receivers, dead letters, redrives, generations and rebuilds."""
    found.look_for(connection, *_CHECKS)
    _check_generations(connection, found)


def _check_generations(connection: Connection, found: Audit) -> None:
    """Those beside the active one: a rollback may need them, and their rows take room."""
    states: dict[str, str] = dict(connection.execute(sa.select(generations.c.generation, generations.c.state)).all())
    known = {
        "rows of": _names(connection, sales_applied.c.generation),
        "totals of": _names(connection, sales_totals.c.generation),
    }
    for what, names in known.items():
        strangers = [name for name in names if name not in states]
        _note(found, f"{what} no generation", strangers)
    for name, state in sorted(states.items()):
        if name == found.generation or state == FAILED:  # one that is dropped loses its totals first
            continue
        rows = {
            row[0]: (row[1], int(row[2]))
            for row in connection.execute(
                sa.select(sales_applied.c.currency, sa.func.count(), sa.func.sum(sales_applied.c.amount))
                .where(sales_applied.c.generation == name)
                .group_by(sales_applied.c.currency)
            )
        }
        off = [code for code, *_ in totals_off(connection, name, rows)]
        _note(found, f"currencies whose totals in {name} are not the sum of its rows", off)
    expected = _names(connection, rebuild_expected.c.rebuild_id)
    begun = set(connection.execute(sa.select(rebuilds.c.rebuild_id)).scalars()) if expected else set()
    _note(found, "expected sets of no rebuild", [name for name in expected if name not in begun])


def _names(connection: Connection, column: sa.ColumnElement[str]) -> list[str]:
    """Its values, each once: one step down the index for each, where DISTINCT would read every row."""
    names: list[str] = []
    while True:
        above = sa.select(sa.func.min(column)).where(*([column > names[-1]] if names else []))
        name = connection.execute(above).scalar_one()
        if name is None:
            return names
        names.append(name)


def _note(found: Audit, what: str, names: list[str]) -> None:
    if names:
        found.breaks.append(Break("I6", what, len(names), tuple(names[:NAMED])))

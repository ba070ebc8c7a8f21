"""I6: one generation is active, its totals are its rows, and its rows are what `sales` took and what a rebuild put in.

A rebuild puts in all that was placed until then, taken or not. So the rows of a generation are known one by one: the
events up to where it was last rebuilt, and beyond that those that are done at `sales`.
"""

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.counts import counted
from contracts.events import ORDER_PLACED
from store.audit_findings import (
    NAMED,
    SALES,
    UNFINISHED,
    Audit,
    Break,
    ByCurrency,
    Check,
    Fingerprint,
    at_receiver,
    delivery_of,
    event_at,
    fingerprint,
    name_of,
    never_for,
    not_taken,
    other_amounts,
    read_fingerprint,
    read_sums,
    same_sums,
)
from store.deliveries import DONE
from store.rebuild import COMPLETED
from store.schema import control, deliveries, generations, outbox, rebuilds, sales_applied, sales_totals


def check_sales(connection: Connection, found: Audit, done: Fingerprint, facts: ByCurrency) -> None:
    """Note what does not hold in `found`. `done`: what is done at `sales`; `facts`: the sums of all orders."""
    active = list(
        connection.execute(
            sa.select(generations.c.generation).where(sa.text("state = 'ACTIVE'")).order_by(generations.c.generation)
        ).scalars()
    )
    named = connection.execute(sa.select(control.c.active_generation)).scalar_one()
    found.generation = named
    if active != [named]:
        found.breaks.append(
            Break("I6", f"generations ACTIVE, where {named} is the one named as active", len(active), tuple(active))
        )
    until = _rebuilt_until(connection, named)
    rows, sums = _rows(connection, named)
    _check_totals(connection, found, named, sums)
    lacking = not_taken(connection, SALES, until)
    if rows != done + _rebuilt_beside_done(connection, until) or not same_sums(facts, sums, lacking):
        _name(connection, found, named, until)


def totals_off(
    connection: Connection, generation: str, rows: dict[str, tuple[int, int]]
) -> list[tuple[str, tuple[int, int] | None, tuple[int, int] | None]]:
    """(currency, its rows, its totals), each as (orders, amount), where the totals are not the sum of the rows."""
    totals: dict[str, tuple[int, int]] = {
        row[0]: (row[1], row[2])
        for row in connection.execute(
            sa.select(sales_totals.c.currency, sales_totals.c.orders, sales_totals.c.amount).where(
                sales_totals.c.generation == generation
            )
        )
    }
    return [
        (code, rows.get(code), totals.get(code))
        for code in sorted(rows.keys() | totals.keys())
        if rows.get(code) != totals.get(code)
    ]


def _rebuilt_until(connection: Connection, generation: str) -> int:
    """Position up to which a rebuild or a rollback has put everything into it; 0 when none did."""
    until = connection.execute(
        sa.select(sa.func.max(rebuilds.c.until_position)).where(
            rebuilds.c.generation == generation, rebuilds.c.state == COMPLETED
        )
    ).scalar_one_or_none()
    return int(until or 0)


def _rows(connection: Connection, generation: str) -> tuple[Fingerprint, ByCurrency]:
    sums, counted = read_sums(
        connection,
        lambda *columns: sa.select(*columns).where(sales_applied.c.generation == generation),
        sales_applied.c.currency,
        sales_applied.c.amount,
        sales_applied.c.position,
        *fingerprint(sales_applied.c.position),
    )
    return read_fingerprint(counted), sums


def _check_totals(connection: Connection, found: Audit, generation: str, sums: ByCurrency) -> None:
    found.sales = {code: (entry.orders, entry.amount) for code, entry in sums.items()}
    off = totals_off(connection, generation, found.sales)
    if off:
        found.breaks.append(
            Break(
                "I6",
                f"currencies whose totals in {generation} are not the sum of its rows",
                len(off),
                tuple(f"{code} (rows {_shown(rows)}, totals {_shown(totals)})" for code, rows, totals in off[:NAMED]),
            )
        )


def _rebuilt_beside_done(connection: Connection, until: int) -> Fingerprint:
    """Events that a rebuild put in though they are not done at `sales`: their delivery, when it comes, adds nothing."""
    found = Fingerprint()
    if not until:
        return found
    position = deliveries.c.position
    for condition in UNFINISHED.values():
        row = connection.execute(
            sa.select(*fingerprint(position)).where(
                at_receiver(SALES),
                sa.text(condition),
                position + 0 <= until,
                event_at(position, ORDER_PLACED),
            )
        ).one()
        found += read_fingerprint(row)
    outside = never_for(connection, SALES)
    if outside is not None:
        row = connection.execute(
            sa.select(*fingerprint(outbox.c.position)).where(outside, outbox.c.position <= until, ~delivery_of(SALES))
        ).one()
        found += read_fingerprint(row)
    return found


def _name(connection: Connection, found: Audit, generation: str, until: int) -> None:
    row = sales_applied.alias()

    def held(position: sa.ColumnElement[int]) -> sa.Exists:
        return sa.exists().select_from(row).where(row.c.generation == generation, row.c.position == position)

    position = sales_applied.c.position
    names = sa.select(name_of(position)).where(sales_applied.c.generation == generation)
    of_event = event_at(position, ORDER_PLACED)
    found.look_for(
        connection,
        Check(
            "I6",
            f"events {DONE} at {SALES} that {generation} lacks",
            sa.select(name_of(deliveries.c.position)).where(
                deliveries.c.receiver == SALES, deliveries.c.status == DONE, ~held(deliveries.c.position)
            ),
        ),
        Check(
            "I6",
            f"events rebuilt into {generation} that it lacks",
            sa.select(outbox.c.event_id).where(
                outbox.c.event_type == ORDER_PLACED,
                outbox.c.position <= until,
                ~held(outbox.c.position),
                ~delivery_of(SALES, state=DONE),
            ),
        ),
        Check("I6", f"rows of {generation} that the history does not have", names.where(~of_event)),
        Check(
            "I6",
            f"rows of {generation} that are neither {DONE} at {SALES} nor rebuilt",
            names.where(position > until, of_event, ~delivery_of(SALES, position, DONE)),
        ),
        Check(
            "I6",
            f"rows of {generation} with another amount than their event",
            other_amounts(connection, sales_applied).where(sales_applied.c.generation == generation),
        ),
    )


def _shown(total: tuple[int, int] | None) -> str:
    return f"{counted(total[0], 'order')}, {total[1]:,}" if total else "nothing"

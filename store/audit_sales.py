"""I6: one generation is active, its totals are its rows, and its rows are the history but for what is on its way."""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from store.audit_findings import (
    NAMED,
    NOT_FANNED_OUT,
    SALES,
    UNFINISHED,
    Audit,
    Break,
    Fingerprint,
    at_sales,
    delivery_of,
    fingerprint,
    held,
    name_of,
    periods,
    read_fingerprint,
    subscribed,
    weighed,
)
from store.deliveries import DONE
from store.dialect import json_integer, json_text
from store.schema import control, deliveries, generations, orders, outbox, sales_applied, sales_totals


def check_generation(connection: Connection, found: Audit, done: Fingerprint) -> None:
    """Note what does not hold in `found`. `done`: what is done at `sales`."""
    _GenerationAuditor(connection, found, done).run()


class _GenerationAuditor:
    def __init__(self, connection: Connection, found: Audit, done: Fingerprint) -> None:
        self._connection = connection
        self._found = found
        self._done = done
        self._weights: dict[str, int] = {}  # of the generation's amounts, by currency

    def run(self) -> None:
        active = list(
            self._connection.execute(
                sa.select(generations.c.generation)
                .where(sa.text("state = 'ACTIVE'"))
                .order_by(generations.c.generation)
            ).scalars()
        )
        named = self._connection.execute(sa.select(control.c.active_generation)).scalar_one()
        self._found.generation = named
        if active != [named]:
            self._found.breaks.append(
                Break("I6", f"generations ACTIVE, where {named} is the one named as active", len(active), tuple(active))
            )
        rows = self._totals(named)
        if rows == self._done + self._held_beside_done(named):
            self._sums(named)
        else:
            self._name_generation(named)
            self._name_amounts(named)

    def _totals(self, generation: str) -> Fingerprint:
        """The fingerprint of its rows; their sums are compared with its totals on the way."""
        rows: dict[str, tuple[int, int]] = {}
        whole = Fingerprint()
        amount, position = sales_applied.c.amount, sales_applied.c.position
        for currency, total, weight, *counted in self._connection.execute(
            sa.select(sales_applied.c.currency, sa.func.sum(amount), weighed(amount, position), *fingerprint(position))
            .where(sales_applied.c.generation == generation)
            .group_by(sales_applied.c.currency)
        ):
            part = read_fingerprint(counted)
            rows[currency] = (part.count, int(total))
            self._weights[currency] = int(weight)
            whole += part
        totals = {
            row[0]: (row[1], row[2])
            for row in self._connection.execute(
                sa.select(sales_totals.c.currency, sales_totals.c.orders, sales_totals.c.amount).where(
                    sales_totals.c.generation == generation
                )
            )
        }
        off = [code for code in sorted(rows.keys() | totals.keys()) if rows.get(code) != totals.get(code)]
        if off:
            self._found.breaks.append(
                Break(
                    "I6",
                    f"currencies whose totals in {generation} are not the sum of its rows",
                    len(off),
                    tuple(
                        f"{currency} (rows {_shown(rows.get(currency))}, totals {_shown(totals.get(currency))})"
                        for currency in off[:NAMED]
                    ),
                )
            )
        self._found.sales = rows
        return whole

    def _held_beside_done(self, generation: str) -> Fingerprint:
        """Events that the generation holds though they are not done at `sales`: a rebuild put them there, and their
        delivery, when it comes, adds nothing."""
        found = Fingerprint()
        for condition in UNFINISHED.values():
            found += read_fingerprint(
                self._connection.execute(
                    sa.select(*fingerprint(deliveries.c.position)).where(
                        at_sales(),
                        sa.text(condition),
                        held(generation, deliveries.c.position),
                    )
                ).one()
            )
        outside = self._not_for_sales()
        if outside is not None:
            found += read_fingerprint(
                self._connection.execute(
                    sa.select(*fingerprint(outbox.c.position)).where(outside, held(generation, outbox.c.position))
                ).one()
            )
        return found

    def _not_for_sales(self) -> sa.ColumnElement[bool] | None:
        """Events of the history that `sales` never took: from before it was registered or after it was ended. None when
        it takes all of them."""
        taken = [period for period in periods(self._connection).get(SALES, []) if period.event_type == ORDER_PLACED]
        if any(period.is_everything for period in taken):
            return None
        return sa.and_(outbox.c.event_type == ORDER_PLACED, ~subscribed(taken))

    def _sums(self, generation: str) -> None:
        """Amounts of the history, by currency, = those of the generation + those that it lacks."""
        sums: dict[str, list[int]] = {}

        def add(sign: int, rows: Iterable[Any]) -> None:
            for currency, *numbers in rows:
                entry = sums.setdefault(currency, [0, 0, 0])
                sums[currency] = [old + sign * int(new) for old, new in zip(entry, numbers, strict=True)]

        currency = json_text(self._connection, outbox.c.payload, "currency").label("paid_in")
        amount = json_integer(self._connection, outbox.c.payload, "amount")
        columns = (currency, sa.func.count(), sa.func.sum(amount), weighed(amount, outbox.c.position))
        placed = outbox.c.event_type == ORDER_PLACED
        of_events = sa.select(*columns).where(placed).group_by(sa.text("paid_in"))
        add(1, self._connection.execute(of_events))
        total = sum(entry[1] for entry in sums.values())
        ordered = self._connection.execute(sa.select(sa.func.coalesce(sa.func.sum(orders.c.amount), 0))).scalar_one()
        add(-1, [(code, number, amount, self._weights[code]) for code, (number, amount) in self._found.sales.items()])
        absent = ~held(generation, outbox.c.position)
        lacking = of_events.where(absent)
        of_deliveries = lacking.join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
        for condition in UNFINISHED.values():
            add(-1, self._connection.execute(of_deliveries.where(at_sales(), sa.text(condition))))
        outside = self._not_for_sales()
        without = lacking.where(~delivery_of(SALES))
        for condition in NOT_FANNED_OUT:
            new = without.where(sa.text(condition))
            add(-1, self._connection.execute(new if outside is None else new.where(~outside)))
        if outside is not None:
            add(-1, self._connection.execute(without.where(outside)))
        if total != int(ordered) or any(any(entry) for entry in sums.values()):
            self._name_amounts(generation)

    def _name_generation(self, generation: str) -> None:
        self._break_if(
            "I6",
            f"events {DONE} at {SALES} that {generation} lacks",
            sa.select(name_of(deliveries.c.position)).where(
                deliveries.c.receiver == SALES,
                deliveries.c.status == DONE,
                ~held(generation, deliveries.c.position),
            ),
        )
        event = (
            sa.exists()
            .select_from(outbox)
            .where(outbox.c.position == sales_applied.c.position, outbox.c.event_type == ORDER_PLACED)
        )
        self._break_if(
            "I6",
            f"rows of {generation} that the history does not have",
            sa.select(name_of(sales_applied.c.position)).where(sales_applied.c.generation == generation, ~event),
        )

    def _name_amounts(self, generation: str) -> None:
        amount = json_integer(self._connection, outbox.c.payload, "amount")
        currency = json_text(self._connection, outbox.c.payload, "currency")
        self._break_if(
            "I6",
            f"rows of {generation} with another amount than their event",
            sa.select(outbox.c.event_id)
            .join_from(sales_applied, outbox, outbox.c.position == sales_applied.c.position)
            .where(
                sales_applied.c.generation == generation,
                outbox.c.event_type == ORDER_PLACED,
                sa.or_(sales_applied.c.amount != amount, sales_applied.c.currency != currency),
            ),
        )
        self._break_if(
            "I1",
            "orders with another amount than their event",
            sa.select(orders.c.id)
            .join_from(orders, outbox, outbox.c.event_id == orders.c.id + ":placed")
            .where(
                outbox.c.event_type == ORDER_PLACED,
                sa.or_(orders.c.amount != amount, orders.c.currency != currency),
            ),
        )

    def _break_if(self, invariant: str, what: str, names: sa.Select[Any]) -> None:
        self._found.break_if(self._connection, invariant, what, names)


def _shown(total: tuple[int, int] | None) -> str:
    return f"{total[0]:,} orders, {total[1]:,}" if total else "nothing"

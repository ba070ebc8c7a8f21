"""The audit: do the invariants hold in this snapshot, and if not, which ids break them?

Sets are compared by fingerprint first (how many, and two sums over their positions), which one scan of each table
gives; only where two fingerprints differ are the sets compared row by row, and the rows that differ named. A million
orders are a few seconds that way, where joining every set with every other took a dozen. Order ids, which are texts,
are always compared one by one.

Read it in one snapshot (`Database.read`): a pipeline that works meanwhile would look broken otherwise.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.identifiers import order_placed_id
from contracts.names import CHARGE, SHIP
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED
from store.dialect import json_integer, json_text
from store.schema import (
    billing_entries,
    charges,
    control,
    deliveries,
    generations,
    job_steps,
    jobs,
    mail_messages,
    orders,
    outbox,
    sales_applied,
    sales_totals,
    shipments,
    subscriptions,
)

NAMED = 20  # ids named of each break
_SALES = "sales"
_EFFECTS = {"billing": billing_entries, "mail": mail_messages}
_NEW = " AND outbox.fanned_out_at IS NULL"
# What waits for the fan-out, found by the two partial indexes on what is unfinished.
_NOT_FANNED_OUT = ("outbox.status = 'PENDING'" + _NEW, "outbox.status = 'PUBLISHED'" + _NEW)
# Literals, as the partial indexes have them.
_UNFINISHED = {
    PENDING: "deliveries.status = 'pending'",
    RETRYING: "deliveries.status = 'retrying'",
    DEAD: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'dead'",
    WAIVED: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'waived'",
}


@dataclass(frozen=True)
class Break:
    """One way in which an invariant does not hold: a sentence, how many, and the first ids."""

    invariant: str
    what: str
    count: int
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReceiverCounts:
    """Where the events that a receiver takes stand: `events` = `not_fanned_out` + the sum of `states`."""

    receiver: str
    events: int
    not_fanned_out: int
    states: dict[str, int]


@dataclass
class Audit:
    """What was counted, and what does not hold. `sales`: currency -> (orders, amount) of the generation's rows."""

    orders: int = 0
    events: int = 0
    jobs: int = 0
    charges: int = 0
    shipments: int = 0
    generation: str = ""
    sales: dict[str, tuple[int, int]] = field(default_factory=dict)
    receivers: list[ReceiverCounts] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every invariant holds."""
        return not self.breaks


@dataclass(frozen=True)
class _Print:
    """Fingerprint of a set of positions. Sets without common members add up."""

    count: int = 0
    total: int = 0
    mixed: int = 0

    def __add__(self, other: "_Print") -> "_Print":
        return _Print(self.count + other.count, self.total + other.total, self.mixed + other.mixed)

    def __sub__(self, other: "_Print") -> "_Print":
        return _Print(self.count - other.count, self.total - other.total, self.mixed - other.mixed)


def audit(connection: Connection) -> Audit:
    """Check I1, I2, I3, I5 and I6 of the snapshot that `connection` reads."""
    return _Auditor(connection).run()


class _Auditor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found = Audit()
        self._total: dict[str, _Print] = {}
        self._by_state: dict[tuple[str, str], _Print] = {}

    def run(self) -> Audit:
        self._orders()
        self._deliveries()
        self._effects()
        self._jobs()
        self._generation()
        return self._found

    # I1

    def _orders(self) -> None:
        found = self._found
        found.orders = self._count(orders)
        found.events = self._count(outbox)
        placed = sa.and_(outbox.c.event_id == orders.c.id + ":placed")
        self._break_if(
            "I1",
            "orders without their event",
            sa.select(orders.c.id).where(~sa.exists().select_from(outbox).where(placed)),
        )
        events = self._scalar(sa.select(sa.func.count()).select_from(outbox).where(outbox.c.event_type == ORDER_PLACED))
        if found.clean and events == found.orders:
            return  # each order has its event, and there are as many
        order_id = sa.func.substr(outbox.c.event_id, 1, sa.func.length(outbox.c.event_id) - len(order_placed_id("")))
        known = sa.exists().select_from(orders).where(orders.c.id == order_id, placed)
        self._break_if(
            "I1",
            f"{ORDER_PLACED} events without their order",
            sa.select(outbox.c.event_id).where(outbox.c.event_type == ORDER_PLACED, ~known),
        )
        self._break_if(
            "I1",
            f"events of an order's name that are no {ORDER_PLACED}",
            sa.select(outbox.c.event_id)
            .join_from(outbox, orders, orders.c.id == order_id)
            .where(placed, outbox.c.event_type != ORDER_PLACED),
        )

    # I2

    def _deliveries(self) -> None:
        connection = self._connection
        position = deliveries.c.position
        rows = connection.execute(sa.select(deliveries.c.receiver, *_print(position)).group_by(deliveries.c.receiver))
        self._total = {row[0]: _read(row[1:]) for row in rows}
        for state, condition in _UNFINISHED.items():
            rows = connection.execute(
                sa.select(deliveries.c.receiver, *_print(position))
                .where(sa.text(condition))
                .group_by(deliveries.c.receiver)
            )
            self._by_state |= {(row[0], state): _read(row[1:]) for row in rows}
        taken = self._subscriptions()
        events = self._events_by_subscription({key for keys in taken.values() for key in keys})
        for receiver in sorted(taken.keys() | self._total.keys()):
            keys = taken.get(receiver, [])
            whole = sum((events[key] for key in keys), _Print())
            waiting = self._not_fanned_out(receiver, keys)
            total = self._total.get(receiver, _Print())
            states = {state: self._state(receiver, state).count for state in (*_UNFINISHED, DONE)}
            self._found.receivers.append(ReceiverCounts(receiver, whole.count, waiting.count, states))
            if total != whole - waiting:
                self._name_deliveries(receiver, keys)

    def _subscriptions(self) -> dict[str, list[tuple[str, int]]]:
        taken: dict[str, list[tuple[str, int]]] = {}
        for receiver, event_type, since in self._connection.execute(
            sa.select(subscriptions.c.receiver, subscriptions.c.event_type, subscriptions.c.since_position)
        ):
            taken.setdefault(receiver, []).append((event_type, since))
        return taken

    def _events_by_subscription(self, keys: set[tuple[str, int]]) -> dict[tuple[str, int], _Print]:
        """Fingerprints of the events of a type after a position, all in one scan."""
        listed = sorted(keys)
        if not listed:
            return {}
        columns = [column for key in listed for column in _print(outbox.c.position, _subscribed([key]))]
        row = self._connection.execute(sa.select(*columns)).one()
        return {key: _read(row[3 * number : 3 * number + 3]) for number, key in enumerate(listed)}

    def _not_fanned_out(self, receiver: str, keys: list[tuple[str, int]]) -> _Print:
        """Events without a delivery yet. One that was published again has its delivery, and counts there."""
        found = _Print()
        for condition in _NOT_FANNED_OUT:
            row = self._connection.execute(
                sa.select(*_print(outbox.c.position)).where(
                    sa.text(condition), _subscribed(keys), ~_delivery_of(receiver)
                )
            ).one()
            found += _read(row)
        return found

    def _name_deliveries(self, receiver: str, keys: list[tuple[str, int]]) -> None:
        self._break_if(
            "I2",
            f"events lost at {receiver}: fanned out, and without a delivery",
            sa.select(outbox.c.event_id).where(
                _subscribed(keys), outbox.c.fanned_out_at.is_not(None), ~_delivery_of(receiver)
            ),
        )
        event = sa.exists().select_from(outbox).where(outbox.c.position == deliveries.c.position, _subscribed(keys))
        self._break_if(
            "I2",
            f"deliveries to {receiver} of no event that it takes",
            sa.select(_name(deliveries.c.position)).where(deliveries.c.receiver == receiver, ~event),
        )

    # I3

    def _effects(self) -> None:
        for receiver, effect in _EFFECTS.items():
            written = _read(self._connection.execute(sa.select(*_print(effect.c.position))).one())
            if written == self._state(receiver, DONE):
                continue
            done = _delivery_of(receiver, effect.c.position, DONE)
            self._break_if(
                "I3",
                f"effects of {receiver} without a delivery that is {DONE}",
                sa.select(_name(effect.c.position)).where(~done),
            )
            there = sa.exists().select_from(effect).where(effect.c.position == deliveries.c.position)
            self._break_if(
                "I3",
                f"deliveries {DONE} at {receiver} without an effect",
                sa.select(_name(deliveries.c.position)).where(
                    deliveries.c.receiver == receiver, deliveries.c.status == DONE, ~there
                ),
            )

    # I5

    def _jobs(self) -> None:
        found = self._found
        found.jobs, found.charges, found.shipments = (self._count(table) for table in (jobs, charges, shipments))

        def step(job_id: sa.ColumnElement[str], name: str) -> sa.Exists:
            done = job_steps.alias()
            return sa.exists().select_from(done).where(done.c.job_id == job_id, done.c.step == name)

        checks: Iterable[tuple[str, sa.Select[Any]]] = (
            (
                "charges of another amount than their job's",
                sa.select(charges.c.job_id)
                .join_from(charges, jobs, jobs.c.job_id == charges.c.job_id)
                .where(jobs.c.amount != charges.c.amount),
            ),
            (
                "charges without a job that records them",
                sa.select(charges.c.job_id).where(~step(charges.c.job_id, CHARGE)),
            ),
            (
                "shipments without a job that records them",
                sa.select(shipments.c.job_id).where(~step(shipments.c.job_id, SHIP)),
            ),
            (
                "jobs shipped and not charged",
                sa.select(job_steps.c.job_id).where(job_steps.c.step == SHIP, ~step(job_steps.c.job_id, CHARGE)),
            ),
            (
                "steps of no job",
                sa.select(job_steps.c.job_id)
                .distinct()
                .where(~sa.exists().select_from(jobs).where(jobs.c.job_id == job_steps.c.job_id)),
            ),
        )
        for what, statement in checks:
            self._break_if("I5", what, statement)

    # I6

    def _generation(self) -> None:
        connection = self._connection
        active = list(
            connection.execute(sa.select(generations.c.generation).where(sa.text("state = 'ACTIVE'"))).scalars()
        )
        named = connection.execute(sa.select(control.c.active_generation)).scalar_one()
        self._found.generation = named
        if active != [named]:
            self._found.breaks.append(
                Break("I6", f"generations ACTIVE, where {named} is the one named as active", len(active), tuple(active))
            )
        held = self._totals(named)
        if held == self._state(_SALES, DONE) + self._held_beside_done(named):
            self._sums(named)
        else:
            self._name_generation(named)
            self._name_amounts(named)

    def _totals(self, generation: str) -> _Print:
        """The fingerprint of its rows; their sums are compared with its totals on the way."""
        rows: dict[str, tuple[int, int]] = {}
        held = _Print()
        for currency, amount, *counted in self._connection.execute(
            sa.select(sales_applied.c.currency, sa.func.sum(sales_applied.c.amount), *_print(sales_applied.c.position))
            .where(sales_applied.c.generation == generation)
            .group_by(sales_applied.c.currency)
        ):
            part = _read(counted)
            rows[currency] = (part.count, int(amount))
            held += part
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
        return held

    def _held_beside_done(self, generation: str) -> _Print:
        """Events that the generation holds though they are not done at `sales`: a rebuild put them there, and their
        delivery, when it comes, adds nothing."""
        found = _Print()
        for condition in _UNFINISHED.values():
            found += _read(
                self._connection.execute(
                    sa.select(*_print(deliveries.c.position)).where(
                        _at_sales(),
                        sa.text(condition),
                        _held(generation, deliveries.c.position),
                    )
                ).one()
            )
        before = self._before_sales()
        if before is not None:
            found += _read(
                self._connection.execute(
                    sa.select(*_print(outbox.c.position)).where(before, _held(generation, outbox.c.position))
                ).one()
            )
        return found

    def _before_sales(self) -> sa.ColumnElement[bool] | None:
        """Events of the history that were there before `sales` took them, or None when it took them from the first."""
        since = self._connection.execute(
            sa.select(subscriptions.c.since_position).where(
                subscriptions.c.receiver == _SALES, subscriptions.c.event_type == ORDER_PLACED
            )
        ).scalar_one_or_none()
        placed = outbox.c.event_type == ORDER_PLACED
        if since is None:
            return placed
        return sa.and_(placed, outbox.c.position <= since) if since else None

    def _sums(self, generation: str) -> None:
        """Orders by currency = what the generation holds + what it lacks; else some amount is another one."""
        sums: dict[str, list[int]] = {}

        def add(sign: int, rows: Iterable[Any]) -> None:
            for currency, count, amount in rows:
                entry = sums.setdefault(currency, [0, 0])
                entry[0] += sign * count
                entry[1] += sign * int(amount)

        count = sa.func.count()
        add(
            1,
            self._connection.execute(
                sa.select(orders.c.currency, count, sa.func.sum(orders.c.amount)).group_by(orders.c.currency)
            ),
        )
        add(-1, [(currency, number, amount) for currency, (number, amount) in self._found.sales.items()])
        currency = json_text(self._connection, outbox.c.payload, "currency").label("paid_in")
        amount = sa.func.sum(json_integer(self._connection, outbox.c.payload, "amount"))
        lacking = sa.select(currency, count, amount).group_by(sa.text("paid_in"))
        absent = ~_held(generation, outbox.c.position)
        for condition in _UNFINISHED.values():
            add(
                -1,
                self._connection.execute(
                    lacking.join_from(deliveries, outbox, outbox.c.position == deliveries.c.position).where(
                        _at_sales(),
                        sa.text(condition),
                        outbox.c.event_type == ORDER_PLACED,
                        absent,
                    )
                ),
            )
        before = self._before_sales()
        new = [sa.and_(sa.text(condition), outbox.c.event_type == ORDER_PLACED) for condition in _NOT_FANNED_OUT]
        for part in (*new, before):
            if part is not None:
                also = [sa.true()] if part is before or before is None else [~before]
                add(-1, self._connection.execute(lacking.where(part, absent, ~_delivery_of(_SALES), *also)))
        if any(entry != [0, 0] for entry in sums.values()):
            self._name_amounts(generation)

    def _name_generation(self, generation: str) -> None:
        self._break_if(
            "I6",
            f"events {DONE} at {_SALES} that {generation} lacks",
            sa.select(_name(deliveries.c.position)).where(
                deliveries.c.receiver == _SALES,
                deliveries.c.status == DONE,
                ~_held(generation, deliveries.c.position),
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
            sa.select(_name(sales_applied.c.position)).where(sales_applied.c.generation == generation, ~event),
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

    def _state(self, receiver: str, state: str) -> _Print:
        if state != DONE:
            return self._by_state.get((receiver, state), _Print())
        unfinished = sum((self._state(receiver, other) for other in _UNFINISHED), _Print())
        return self._total.get(receiver, _Print()) - unfinished

    def _break_if(self, invariant: str, what: str, names: sa.Select[Any]) -> None:
        """Note a break when `names` has rows. Counted only then."""
        found = list(self._connection.execute(names.limit(NAMED)).scalars())
        if found:
            count = len(found)
            if count == NAMED:
                count = self._scalar(sa.select(sa.func.count()).select_from(names.subquery()))
            self._found.breaks.append(Break(invariant, what, count, tuple(found)))

    def _count(self, table: sa.Table) -> int:
        return self._scalar(sa.select(sa.func.count()).select_from(table))

    def _scalar(self, statement: sa.Select[Any]) -> int:
        number: int = self._connection.execute(statement).scalar_one()
        return number


def _print(position: sa.ColumnElement[int], where: sa.ColumnElement[bool] | None = None) -> list[Any]:
    """The columns of a fingerprint. The factors keep the sum within 64 bits for 8,000 million rows."""
    mixed = (position % sa.literal_column("32749")) * (position % sa.literal_column("32771"))
    pick: Callable[[Any], Any] = (lambda value: value) if where is None else (lambda value: sa.case((where, value)))
    return [sa.func.count(pick(position)), sa.func.sum(pick(position)), sa.func.sum(pick(mixed))]


def _read(row: Iterable[Any]) -> _Print:
    count, total, mixed = row
    return _Print(count, int(total or 0), int(mixed or 0))


def _subscribed(keys: list[tuple[str, int]]) -> sa.ColumnElement[bool]:
    # `+ 0`: SQLite would take `position > 0` for a reason to read the whole table, instead of the partial index.
    return sa.or_(
        sa.false(),
        *(sa.and_(outbox.c.event_type == event_type, outbox.c.position + 0 > since) for event_type, since in keys),
    )


def _at_sales() -> sa.ColumnElement[bool]:
    # Not by the primary key, which begins with the receiver: the partial index on what is unfinished is the short way.
    return deliveries.c.receiver + "" == _SALES


def _delivery_of(receiver: str, position: sa.ColumnElement[int] = outbox.c.position, state: str = "") -> sa.Exists:
    of = deliveries.alias()
    conditions = [of.c.receiver == receiver, of.c.position == position]
    return sa.exists().select_from(of).where(*conditions, *([of.c.status == state] if state else []))


def _held(generation: str, position: sa.ColumnElement[int]) -> sa.Exists:
    held = sales_applied.alias()
    return sa.exists().select_from(held).where(held.c.generation == generation, held.c.position == position)


def _name(position: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    """The event id at a position, or the position where there is no event."""
    event = outbox.alias()
    found = sa.select(event.c.event_id).where(event.c.position == position).scalar_subquery()
    return sa.func.coalesce(found, "position " + sa.cast(position, sa.Text))


def _shown(total: tuple[int, int] | None) -> str:
    return f"{total[0]:,} orders, {total[1]:,}" if total else "nothing"

"""The audit: do the invariants hold in this snapshot, and if not, which ids break them?

Sets are compared by fingerprint first (how many, and two sums over their positions), which one scan of each table
gives; only where two fingerprints differ are the sets compared row by row, and the rows that differ named. A million
orders are a few seconds that way, where joining every set with every other took a dozen. Order ids, which are texts,
are always compared one by one.

Read it in one snapshot (`Database.read`): a pipeline that works meanwhile would look broken otherwise.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.identifiers import order_placed_id
from contracts.names import CHARGE, SHIP
from store.audit_findings import (
    NOT_FANNED_OUT,
    SALES,
    UNFINISHED,
    Audit,
    Fingerprint,
    Period,
    ReceiverCounts,
    delivery_of,
    fingerprint,
    name_of,
    periods,
    read_fingerprint,
    subscribed,
)
from store.audit_sales import check_generation
from store.deliveries import DONE
from store.schema import (
    billing_entries,
    charges,
    deliveries,
    job_steps,
    jobs,
    mail_messages,
    orders,
    outbox,
    shipments,
)

_EFFECTS = {"billing": billing_entries, "mail": mail_messages}


def audit(connection: Connection) -> Audit:
    """Check I1, I2, I3, I5 and I6 of the snapshot that `connection` reads."""
    return _Auditor(connection).run()


class _Auditor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found = Audit()
        self._total: dict[str, Fingerprint] = {}
        self._by_state: dict[tuple[str, str], Fingerprint] = {}

    def run(self) -> Audit:
        self._orders()
        self._deliveries()
        self._effects()
        self._jobs()
        check_generation(self._connection, self._found, self._state(SALES, DONE))
        return self._found

    # I1

    def _orders(self) -> None:
        found = self._found
        found.orders = self._count(orders)
        found.events = self._count(outbox)
        placed = outbox.c.event_id == orders.c.id + ":placed"
        self._break_if(
            "I1",
            "orders without their event",
            sa.select(orders.c.id).where(~sa.exists().select_from(outbox).where(placed)),
        )
        events = self._scalar(sa.select(sa.func.count()).select_from(outbox).where(outbox.c.event_type == ORDER_PLACED))
        if found.clean and events == found.orders:
            return  # each order has its event, and there are as many
        length = sa.func.length(outbox.c.event_id) - len(order_placed_id(""))
        # PostgreSQL refuses to cut at a negative length.
        order_id = sa.case((length > 0, sa.func.substr(outbox.c.event_id, 1, length)), else_="")
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
        rows = connection.execute(
            sa.select(deliveries.c.receiver, *fingerprint(position)).group_by(deliveries.c.receiver)
        )
        self._total = {row[0]: read_fingerprint(row[1:]) for row in rows}
        for state, condition in UNFINISHED.items():
            rows = connection.execute(
                sa.select(deliveries.c.receiver, *fingerprint(position))
                .where(sa.text(condition))
                .group_by(deliveries.c.receiver)
            )
            self._by_state |= {(row[0], state): read_fingerprint(row[1:]) for row in rows}
        taken = periods(connection)
        events = self._events_by_subscription({key for keys in taken.values() for key in keys})
        for receiver in sorted(taken.keys() | self._total.keys()):
            keys = taken.get(receiver, [])
            whole = sum((events[key] for key in keys), Fingerprint())
            waiting = self._not_fanned_out(receiver, keys)
            total = self._total.get(receiver, Fingerprint())
            states = {state: self._state(receiver, state).count for state in (*UNFINISHED, DONE)}
            self._found.receivers.append(ReceiverCounts(receiver, whole.count, waiting.count, states))
            if total != whole - waiting:
                self._name_deliveries(receiver, keys)

    def _events_by_subscription(self, keys: set[Period]) -> dict[Period, Fingerprint]:
        """Fingerprints of the events of each period, all in one scan."""
        listed = sorted(keys)
        if not listed:
            return {}
        columns = [column for key in listed for column in fingerprint(outbox.c.position, subscribed([key]))]
        row = self._connection.execute(sa.select(*columns)).one()
        return {key: read_fingerprint(row[3 * number : 3 * number + 3]) for number, key in enumerate(listed)}

    def _not_fanned_out(self, receiver: str, keys: list[Period]) -> Fingerprint:
        """Events without a delivery yet. One that was published again has its delivery, and counts there."""
        found = Fingerprint()
        for condition in NOT_FANNED_OUT:
            row = self._connection.execute(
                sa.select(*fingerprint(outbox.c.position)).where(
                    sa.text(condition), subscribed(keys), ~delivery_of(receiver)
                )
            ).one()
            found += read_fingerprint(row)
        return found

    def _name_deliveries(self, receiver: str, keys: list[Period]) -> None:
        self._break_if(
            "I2",
            f"events lost at {receiver}: fanned out, and without a delivery",
            sa.select(outbox.c.event_id).where(
                subscribed(keys), outbox.c.fanned_out_at.is_not(None), ~delivery_of(receiver)
            ),
        )
        event = sa.exists().select_from(outbox).where(outbox.c.position == deliveries.c.position, subscribed(keys))
        self._break_if(
            "I2",
            f"deliveries to {receiver} of no event that it takes",
            sa.select(name_of(deliveries.c.position)).where(deliveries.c.receiver == receiver, ~event),
        )

    # I3

    def _effects(self) -> None:
        for receiver, effect in _EFFECTS.items():
            written = read_fingerprint(self._connection.execute(sa.select(*fingerprint(effect.c.position))).one())
            if written == self._state(receiver, DONE):
                continue
            done = delivery_of(receiver, effect.c.position, DONE)
            self._break_if(
                "I3",
                f"effects of {receiver} without a delivery that is {DONE}",
                sa.select(name_of(effect.c.position)).where(~done),
            )
            there = sa.exists().select_from(effect).where(effect.c.position == deliveries.c.position)
            self._break_if(
                "I3",
                f"deliveries {DONE} at {receiver} without an effect",
                sa.select(name_of(deliveries.c.position)).where(
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

    def _state(self, receiver: str, state: str) -> Fingerprint:
        if state != DONE:
            return self._by_state.get((receiver, state), Fingerprint())
        unfinished = sum((self._state(receiver, other) for other in UNFINISHED), Fingerprint())
        return self._total.get(receiver, Fingerprint()) - unfinished

    def _break_if(self, invariant: str, what: str, names: sa.Select[Any]) -> None:
        self._found.break_if(self._connection, invariant, what, names)

    def _count(self, table: sa.Table) -> int:
        return self._scalar(sa.select(sa.func.count()).select_from(table))

    def _scalar(self, statement: sa.Select[Any]) -> int:
        number: int = self._connection.execute(statement).scalar_one()
        return number

"""The audit: do the invariants hold in this snapshot, and if not, which ids break them?

Sets are compared by fingerprint first (how many, and two sums over their positions; amounts likewise), which one scan
of each table gives; only where two fingerprints differ are the sets compared row by row, and the rows that differ
named. A million orders are a few seconds that way, where joining every set with every other took a dozen. Orders and
their events, whose ids are texts, are always compared one by one.

Read it in one snapshot (`Database.read`): a pipeline that works meanwhile would look broken otherwise.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED, ORDER_SHIPPED, PAYMENT_CAPTURED
from store.audit_findings import (
    SALES,
    UNFINISHED,
    Audit,
    ByCurrency,
    Check,
    Fingerprint,
    ReceiverCounts,
    delivery_of,
    event_at,
    fingerprint,
    name_of,
    not_taken,
    other_amounts,
    other_orders,
    periods,
    read_fingerprint,
    read_sums,
    same_sums,
    taken,
    within,
    without_delivery,
)
from store.audit_jobs import check_jobs
from store.audit_orders import check_orders
from store.audit_records import check_records
from store.audit_sales import check_sales
from store.audit_sequence import check_sequence
from store.deliveries import DONE
from store.schema import billing_entries, deliveries, mail_messages, outbox

_BILLING, _MAIL = "billing", "mail"
_EFFECTS = {_BILLING: billing_entries, _MAIL: mail_messages}
_TYPES = (ORDER_PLACED, PAYMENT_CAPTURED, ORDER_SHIPPED)  # that stand one to one for other rows


def audit(connection: Connection) -> Audit:
    """Check I1 to I6 of the snapshot that `connection` reads."""
    return _Auditor(connection).run()


class _Auditor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found = Audit()
        self._total: dict[str, Fingerprint] = {}
        self._by_state: dict[tuple[str, str], Fingerprint] = {}
        self._misdelivered: set[str] = set()  # receivers with other deliveries than those of the events they take

    def run(self) -> Audit:
        connection, found = self._connection, self._found
        whole, types = self._read_events()
        facts = check_orders(connection, found, types[ORDER_PLACED])
        self._check_deliveries(whole)
        self._check_effects(facts)
        check_sequence(connection, found)
        check_jobs(connection, found, types)
        check_sales(connection, found, self._state(SALES, DONE), facts)
        check_records(connection, found)
        return found

    # I2

    def _read_events(self) -> tuple[dict[str, Fingerprint], dict[str, int]]:
        """Receiver -> all events that it takes; event type -> how many events. All in one reading."""
        listed = [(receiver, key) for receiver, keys in periods(self._connection).items() for key in keys]
        # Receivers that take the same from the same place on have the same events.
        keys = sorted({key for _, key in listed})
        columns: list[Any] = [sa.func.count()]
        columns += [sa.func.count(sa.case((outbox.c.event_type == event_type, 1))) for event_type in _TYPES]
        for key in keys:
            columns += fingerprint(outbox.c.position, within(key))
        row = list(self._connection.execute(sa.select(*columns).select_from(outbox)).one())
        self._found.events, counts, numbers = row[0], row[1 : len(_TYPES) + 1], row[len(_TYPES) + 1 :]
        events = {key: read_fingerprint(numbers[3 * place : 3 * place + 3]) for place, key in enumerate(keys)}
        whole: dict[str, Fingerprint] = {}
        for receiver, key in listed:
            whole[receiver] = whole.get(receiver, Fingerprint()) + events[key]
        return whole, dict(zip(_TYPES, counts, strict=True))

    def _check_deliveries(self, whole: dict[str, Fingerprint]) -> None:
        position = deliveries.c.position
        self._total = self._by_receiver(
            sa.select(deliveries.c.receiver, *fingerprint(position)).group_by(deliveries.c.receiver)
        )
        for state, condition in UNFINISHED.items():
            found = self._by_receiver(
                sa.select(deliveries.c.receiver, *fingerprint(position))
                .where(sa.text(condition))
                .group_by(deliveries.c.receiver)
            )
            self._by_state |= {(receiver, state): part for receiver, part in found.items()}
        waiting = self._not_fanned_out()
        for receiver in sorted(whole.keys() | self._total.keys()):
            its_own, on_its_way = whole.get(receiver, Fingerprint()), waiting.get(receiver, Fingerprint())
            states = {state: self._state(receiver, state).count for state in (*UNFINISHED, DONE)}
            self._found.receivers.append(ReceiverCounts(receiver, its_own.count, on_its_way.count, states))
            if self._total.get(receiver, Fingerprint()) != its_own - on_its_way:
                self._misdelivered.add(receiver)
                self._name_deliveries(receiver)

    def _by_receiver(self, statement: sa.Select[Any]) -> dict[str, Fingerprint]:
        return {row[0]: read_fingerprint(row[1:]) for row in self._connection.execute(statement)}

    def _not_fanned_out(self) -> dict[str, Fingerprint]:
        """Receiver -> its events without a delivery yet. One that was published again has its delivery, and counts
        there."""
        found: dict[str, Fingerprint] = {}
        for unregistered in without_delivery(taken.c.receiver, *fingerprint(outbox.c.position)):
            parts = self._by_receiver(unregistered.group_by(taken.c.receiver))
            for receiver, part in parts.items():
                found[receiver] = found.get(receiver, Fingerprint()) + part
        return found

    def _name_deliveries(self, receiver: str) -> None:
        taking = sa.or_(sa.false(), *(within(period) for period in periods(self._connection).get(receiver, [])))
        self._break_if(
            "I2",
            f"events lost at {receiver}: fanned out, and without a delivery",
            sa.select(outbox.c.event_id).where(taking, outbox.c.fanned_out_at.is_not(None), ~delivery_of(receiver)),
        )
        event = sa.exists().select_from(outbox).where(outbox.c.position == deliveries.c.position, taking)
        self._break_if(
            "I2",
            f"deliveries to {receiver} of no event that it takes",
            sa.select(name_of(deliveries.c.position)).where(deliveries.c.receiver == receiver, ~event),
        )

    # I3

    def _check_effects(self, facts: ByCurrency) -> None:
        for receiver in _EFFECTS:
            written, sums = self._read_effects(receiver)
            if receiver in self._misdelivered or written != self._state(receiver, DONE):
                self._name_effects(receiver)
            # Each has its event; of those that hold an amount it is the event's.
            if sums is not None and not same_sums(facts, sums, not_taken(self._connection, receiver)):
                self._break_if(
                    "I3",
                    f"effects of {receiver} with another amount than their event",
                    other_amounts(self._connection, _EFFECTS[receiver]),
                )
            # Texts have no sums, so these are compared one by one. A mail's subject is not: it is words around the
            # order's id, and those of an old mail may be another release's.
            self._break_if(
                "I3", f"effects of {receiver} of another order than their event", other_orders(_EFFECTS[receiver])
            )

    def _read_effects(self, receiver: str) -> tuple[Fingerprint, ByCurrency | None]:
        effect = _EFFECTS[receiver]
        counted = fingerprint(effect.c.position)
        if "amount" not in effect.c:
            return read_fingerprint(self._connection.execute(sa.select(*counted)).one()), None
        sums, others = read_sums(
            self._connection,
            lambda *columns: sa.select(*columns).select_from(effect),
            effect.c.currency,
            effect.c.amount,
            effect.c.position,
            *counted,
        )
        return read_fingerprint(others), sums

    def _name_effects(self, receiver: str) -> None:
        effect = _EFFECTS[receiver]
        done = delivery_of(receiver, effect.c.position, DONE)
        self._break_if(
            "I3",
            f"effects of {receiver} without a delivery that is {DONE}",
            sa.select(name_of(effect.c.position)).where(~done),
        )
        self._break_if(
            "I3",
            f"effects of {receiver} of no event",
            sa.select(name_of(effect.c.position)).where(done, ~event_at(effect.c.position)),
        )
        there = sa.exists().select_from(effect).where(effect.c.position == deliveries.c.position)
        self._break_if(
            "I3",
            f"deliveries {DONE} at {receiver} without an effect",
            sa.select(name_of(deliveries.c.position)).where(
                deliveries.c.receiver == receiver, deliveries.c.status == DONE, ~there
            ),
        )

    def _state(self, receiver: str, state: str) -> Fingerprint:
        if state != DONE:
            return self._by_state.get((receiver, state), Fingerprint())
        unfinished = sum((self._state(receiver, other) for other in UNFINISHED), Fingerprint())
        return self._total.get(receiver, Fingerprint()) - unfinished

    def _break_if(self, invariant: str, what: str, names: sa.Select[Any]) -> None:
        self._found.look_for(self._connection, Check(invariant, what, names))

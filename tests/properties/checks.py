"""What holds after every step and at the end: read in one snapshot, and judged by the model."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import sqlalchemy as sa

from store.audit import audit
from store.audit_findings import Break
from store.control import Control, read_control
from store.schema import billing_entries, deliveries, mail_messages, orders, outbox, sales_applied, sales_totals
from tests.properties.dying import journal
from tests.properties.model import Model
from tests.properties.world import World


@dataclass
class Seen:
    """One snapshot, by event ids. `states`: receiver -> event id -> state; `took`: receiver -> what it took, in order;
    `generations`: generation -> order id -> (amount, currency)."""

    control: Control
    breaks: list[Break]
    orders: dict[str, tuple[int, str]]
    events: list[str]
    states: dict[str, dict[str, str]]
    attempts: dict[tuple[str, str], int]
    took: dict[str, list[str]]
    billed: dict[str, tuple[int, str]]
    mailed: list[str]
    generations: dict[str, dict[str, tuple[int, str]]]
    totals: dict[str, dict[str, tuple[int, int]]]

    @property
    def active(self) -> str:
        return self.control.active_generation

    def in_state(self, *states: str) -> set[tuple[str, str]]:
        """(receiver, event id) of the deliveries in one of these states."""
        return {
            (name, event) for name, known in self.states.items() for event, state in known.items() if state in states
        }


# Made once: making them anew takes longer than running them.
_EVENTS = sa.select(outbox.c.position, outbox.c.event_id).order_by(outbox.c.position)
_DELIVERIES = sa.select(deliveries.c.receiver, deliveries.c.position, deliveries.c.status, deliveries.c.attempts)
_TOOK = sa.select(journal.c.receiver, journal.c.position).order_by(journal.c.n)
_APPLIED = sa.select(*sales_applied.c)
_TOTALS = sa.select(*sales_totals.c)
_ORDERS = sa.select(orders.c.id, orders.c.amount, orders.c.currency)
_BILLED = sa.select(billing_entries.c.order_id, billing_entries.c.amount, billing_entries.c.currency)
_MAILED = sa.select(mail_messages.c.order_id)


def look(world: World, *, audited: bool = True) -> Seen:
    """The whole shop as it stands; `audited`: with what the audit finds."""
    with world.database.read() as connection:
        names = dict(connection.execute(_EVENTS).all())
        states: dict[str, dict[str, str]] = defaultdict(dict)
        attempts = {}
        for receiver, position, status, tried in connection.execute(_DELIVERIES):
            states[receiver][names[position]] = status
            attempts[receiver, names[position]] = tried
        took: dict[str, list[str]] = defaultdict(list)
        for receiver, position in connection.execute(_TOOK):
            took[receiver].append(names[position])
        generations: dict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
        for generation, position, amount, currency in connection.execute(_APPLIED):
            generations[generation][names[position].removesuffix(":placed")] = (amount, currency)
        totals: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for generation, currency, count, amount in connection.execute(_TOTALS):
            totals[generation][currency] = (count, amount)
        return Seen(
            control=read_control(connection),
            breaks=audit(connection).breaks if audited else [],
            orders={row[0]: (row[1], row[2]) for row in connection.execute(_ORDERS)},
            events=list(names.values()),
            states=states,
            attempts=attempts,
            took=took,
            billed={row[0]: (row[1], row[2]) for row in connection.execute(_BILLED)},
            mailed=sorted(connection.execute(_MAILED).scalars()),
            generations=generations,
            totals=totals,
        )


def check(seen: Seen, model: Model) -> None:
    """What holds at every instant."""
    assert seen.breaks == []
    assert seen.orders == {name: (order.amount, order.currency) for name, order in model.orders.items()}
    assert seen.events == [fact.event_id for fact in model.facts]
    assert (seen.control.intake == "PAUSED") == model.paused
    for receiver, states in seen.states.items():
        _check_receiver(receiver, states, seen.took.get(receiver, []), model)
    assert seen.took.keys() <= seen.states.keys()
    taken = {name: {event.removesuffix(":placed") for event in seen.took.get(name, [])} for name in ("billing", "mail")}
    assert seen.billed == {name: seen.orders[name] for name in taken["billing"]}
    assert seen.mailed == sorted(taken["mail"])
    counted = model.counted(seen.took.get("sales", []))
    assert seen.generations.get(seen.active, {}) == {name: seen.orders[name] for name in counted}
    assert seen.totals.get(seen.active, {}) == model.totals(counted)


def _check_receiver(receiver: str, states: dict[str, str], took: list[str], model: Model) -> None:
    owed = model.owed(receiver)
    assert states.keys() <= set(owed), f"{receiver} was given what it does not take"
    twice = [event for event, count in Counter(took).items() if count > 1]
    assert twice == [], f"{receiver} took it twice"
    assert {event for event, state in states.items() if state == "done"} == set(took)
    in_order = {aggregate: ids for aggregate, ids in model.by_aggregate(owed).items() if states.keys() & set(ids)}
    for aggregate, ids in in_order.items():
        # No gap in what is registered, and of that taken from the front, past what a person waived.
        assert states.keys() & set(ids) == set(ids[: len(states.keys() & set(ids))]), f"{receiver}: gap in {aggregate}"
        reached = [event for event in ids if states.get(event) not in (None, "waived")]
        done = [event for event in reached if states[event] == "done"]
        assert done == reached[: len(done)], f"{receiver}: {aggregate} is out of order"
    for aggregate, ids in model.by_aggregate(took).items():
        assert ids == [event for event in in_order[aggregate] if event in ids], (
            f"{receiver}: {aggregate} came otherwise"
        )


def check_change(before: Seen, after: Seen, *, revives: bool, switches: bool) -> None:
    """What a step may do to what was final. `revives`: it may take dead letters up again or waive them; `switches`: it
    may make another generation active."""
    for receiver, took in before.took.items():
        assert after.took[receiver][: len(took)] == took, f"{receiver} forgot or took in the past"
    assert before.in_state("waived") <= after.in_state("waived")
    if not revives:
        assert before.in_state("dead") <= after.in_state("dead")
        fewer = {key for key, tried in before.attempts.items() if after.attempts[key] < tried}
        assert fewer == set(), "attempts were forgotten"
    if not switches:
        assert after.active == before.active


def check_end(seen: Seen, model: Model) -> None:
    """Everything has drained: whoever was owed an event took it, unless a person waived it."""
    check(seen, model)
    for receiver in model.takes:
        waived = {event for name, event in seen.in_state("waived") if name == receiver}
        assert set(seen.took.get(receiver, [])) == set(model.owed(receiver)) - waived
        assert seen.states.get(receiver, {}).keys() == set(model.owed(receiver))

"""Several orders in one transaction: each has the answer that it would have had alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from contracts.errors import Conflict, IntakePaused, StoreBusy
from contracts.orders import Order
from intake import Intake
from store.engine import Database
from store.orders import PlacedOrder, place_order
from store.outbox import append_event, events_of
from store.schema import control
from tests.store.scenes import order, place, rows, together

NO_ORDER = replace(order(9), qty=0)  # the database itself refuses it


async def _nobody() -> None:
    """There is no pipeline to wake."""


def place_all(database: Database, *group: Order) -> list[PlacedOrder | Exception]:
    return Intake(database, _nobody).place_all(lambda: group)


def recorded(database: Database) -> list[str]:
    """Ids of the orders in the order of their events; each has exactly its one event."""
    events = rows(database, "SELECT event_id, aggregate_id, seq FROM outbox ORDER BY position")
    ids = [event_id.removesuffix(":placed") for event_id, _, _ in events]
    assert events == [(f"{order_id}:placed", f"order/{order_id}", 1) for order_id in ids]
    assert sorted(ids) == sorted(row[0] for row in rows(database, "SELECT id FROM orders"))
    return ids


def names(answers: Sequence[object]) -> list[object]:
    return [answer.created if isinstance(answer, PlacedOrder) else type(answer) for answer in answers]


def test_each_order_of_a_group_is_written_with_its_event_and_answered_in_its_place(database: Database) -> None:
    group = [order(3), order(1), order(2)]
    answers = place_all(database, *group)
    assert [(a.order, a.created, a.cold) for a in answers if isinstance(a, PlacedOrder)] == [
        (each, True, True) for each in group
    ]
    assert recorded(database) == ["order-3", "order-1", "order-2"]
    with database.read() as connection:
        [row] = events_of(connection, "order/order-3")
    assert row.event.payload == {"order_id": "order-3", "sku": "sku-1", "qty": 1, "amount": 300, "currency": "JPY"}
    assert place_all(database) == []


def test_one_id_twice_in_a_group_is_one_order(database: Database) -> None:
    first, again, other, last = place_all(database, order(1), order(1), order(1, amount=7), order(2))
    assert names([first, again, other, last]) == [True, False, Conflict, True]
    assert isinstance(first, PlacedOrder)
    assert again == replace(first, created=False, cold=False)
    assert recorded(database) == ["order-1", "order-2"]
    assert names(place_all(database, order(1), order(1, qty=2))) == [False, Conflict]


def test_an_order_that_the_database_refuses_fails_alone(database: Database) -> None:
    answers = place_all(database, order(2), NO_ORDER, order(1), order(2), order(2, qty=3))
    assert names(answers) == [True, IntegrityError, True, False, Conflict]
    assert sorted(recorded(database)) == ["order-1", "order-2"]


def test_an_order_whose_event_is_there_without_it_is_placed_as_it_would_be_alone(database: Database) -> None:
    with database.write() as connection:
        for number in (1, 2):
            append_event(
                connection,
                event_id=f"order-{number}:placed",
                aggregate_id=f"order/order-{number}",
                event_type="order-placed",
                payload=order(number).payload(),
            )
    assert names(place_all(database, order(1), order(2, qty=2), order(3))) == [True, Conflict, True]
    assert sorted(row[0] for row in rows(database, "SELECT id FROM orders")) == ["order-1", "order-3"]
    assert len(rows(database, "SELECT 1 FROM outbox")) == 3


def test_a_paused_intake_answers_the_old_ones_of_a_group(database: Database) -> None:
    place(database, 1)
    with database.write() as connection:
        connection.execute(sa.update(control).values(intake="PAUSED", paused_by="rebuild-1"))
    answers = place_all(database, order(2), order(1), order(1, qty=2))
    assert names(answers) == [IntakePaused, False, Conflict]
    assert isinstance(answers[0], IntakePaused)
    assert answers[0].paused_by == "rebuild-1"
    assert recorded(database) == ["order-1"]


def test_groups_at_once_that_share_orders_place_each_once(database: Database) -> None:
    groups = [[order(number) for number in range(1, 9)][:: 1 if turn % 2 else -1] for turn in range(6)]
    results = together(*[lambda group=group: place_all(database, *group) for group in groups])
    assert sum(answer.created for answers in results for answer in answers) == 8
    assert sorted(recorded(database)) == sorted(f"order-{number}" for number in range(1, 9))


def test_what_concerns_the_whole_transaction_is_nobody_s_answer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> None:
        raise StoreBusy("the disk is slow")

    place(database, 1)
    for step, placing in (("place_new_orders", order(2)), ("place_orders", order(1)), ("place_order", NO_ORDER)):
        with monkeypatch.context() as patch:
            patch.setattr(f"intake.{step}", slow)
            with pytest.raises(StoreBusy):
                place_all(database, placing)
    assert recorded(database) == ["order-1"]


ORDERS = st.builds(order, st.integers(1, 4), qty=st.sampled_from([0, 1, 2]))
_runs = count()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(ORDERS, max_size=3), group=st.lists(ORDERS, max_size=8))
def test_a_group_is_answered_as_if_each_had_come_alone(
    sqlite: Database, before: list[Order], group: list[Order]
) -> None:
    run = next(_runs)

    def fresh(way: str, orders: list[Order]) -> list[Order]:
        return [replace(each, id=f"{way}-{run}-{each.id}") for each in orders]

    def alone(placing: Order) -> PlacedOrder | Exception:
        try:
            with sqlite.write() as connection:
                return place_order(connection, placing, 1)
        except (Conflict, IntegrityError) as error:
            return error

    for way in ("alone", "group"):
        for each in fresh(way, before):
            alone(each)
    one_by_one = [alone(each) for each in fresh("alone", group)]
    assert names(place_all(sqlite, *fresh("group", group))) == names(one_by_one)
    stored = [
        rows(sqlite, f"SELECT substr(id, {len(f'{way}-{run}-') + 1}), qty FROM orders WHERE id LIKE '{way}-{run}-%'")
        for way in ("alone", "group")
    ]
    assert sorted(stored[0]) == sorted(stored[1])

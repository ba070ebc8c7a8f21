"""Intake: an order and its event are one fact."""

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import Conflict, IntakePaused, NotFound
from store import orders as intake
from store.control import hold_lease
from store.engine import Database
from store.orders import get_order, place_order
from store.outbox import events_of, find_event
from store.schema import control
from store.status import count_orders, outbox_status
from tests.store.scenes import order, place, together


def _pause(database: Database, by: str | None = "rebuild-1") -> None:
    with database.write() as connection:
        connection.execute(sa.update(control).values(intake="PAUSED", paused_by=by))


def _counts(database: Database) -> tuple[int, int]:
    with database.read() as connection:
        return count_orders(connection), outbox_status(connection).total


def test_an_order_and_its_event_are_written_together(database: Database) -> None:
    with database.write() as connection:
        placed = place_order(connection, order(7), now=1234)
    assert (placed.order, placed.placed_at, placed.created) == (order(7), 1234, True)
    with database.read() as connection:
        row = find_event(connection, "order-7")
        assert get_order(connection, "order-7") == get_order(connection, "order-7:placed")
    assert (row.event.event_id, row.event.aggregate_id, row.event.seq) == ("order-7:placed", "order/order-7", 1)
    assert (row.status, row.published_at, row.fanned_out_at) == ("PENDING", None, None)
    assert row.event.payload == {"order_id": "order-7", "sku": "sku-1", "qty": 1, "amount": 700, "currency": "JPY"}


def test_a_failure_between_the_two_inserts_leaves_neither(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("between the inserts")

    monkeypatch.setattr(intake, "append_event", explode)
    with pytest.raises(RuntimeError, match="between"), database.write() as connection:
        place_order(connection, order(1), 1)
    assert _counts(database) == (0, 0)
    monkeypatch.undo()
    place(database, 2)  # the number that was rolled back stops nothing behind it
    assert _counts(database) == (1, 1)


def test_the_same_order_again_is_answered_as_the_first_time(database: Database) -> None:
    with database.write() as connection:
        first = place_order(connection, order(1), now=5)
    with database.write() as connection:
        again = place_order(connection, order(1), now=99)
    assert (again.order, again.placed_at, again.created) == (first.order, 5, False)
    assert _counts(database) == (1, 1)


@pytest.mark.parametrize("change", [{"sku": "other"}, {"qty": 2}, {"amount": 101}, {"currency": "EUR"}])
def test_the_same_id_with_other_content_is_a_conflict(database: Database, change: dict[str, Any]) -> None:
    place(database, 1)
    with pytest.raises(Conflict, match="order-1"), database.write() as connection:
        place_order(connection, replace(order(1), **change), 2)
    with database.read() as connection:
        assert get_order(connection, "order-1").order == order(1)
    assert _counts(database) == (1, 1)


def test_a_paused_intake_takes_no_new_order_and_answers_an_old_one(database: Database) -> None:
    place(database, 1)
    _pause(database)
    with pytest.raises(IntakePaused, match="order intake paused") as raised, database.write() as connection:
        place_order(connection, order(2), 2)
    assert raised.value.paused_by == "rebuild-1"
    with database.write() as connection:
        assert not place_order(connection, order(1), 2).created
    with pytest.raises(Conflict), database.write() as connection:
        place_order(connection, order(1, amount=5), 2)
    assert _counts(database) == (1, 1)


def test_an_order_is_cold_exactly_when_nobody_holds_the_lease(database: Database) -> None:
    with database.write() as connection:
        assert place_order(connection, order(1), now=100).cold
        hold_lease(connection, until=200)
        assert not place_order(connection, order(2), now=199).cold
        assert place_order(connection, order(3), now=200).cold


def test_two_threads_that_place_one_order_make_one(database: Database) -> None:
    def call() -> bool:
        with database.write() as connection:
            return place_order(connection, order(1), 1).created

    assert sorted(together(*[call] * 6)) == [False] * 5 + [True]
    assert _counts(database) == (1, 1)


def test_two_threads_with_other_contents_make_one_order_and_conflicts(database: Database) -> None:
    def place_it(amount: int) -> int:
        with database.write() as connection:
            return place_order(connection, order(1, amount=amount), 1).order.amount

    results = together(*[lambda amount=amount: place_it(amount) for amount in range(1, 6)])
    won = [result for result in results if isinstance(result, int)]
    assert len(won) == 1
    assert all(isinstance(result, Conflict) for result in results if result not in won)
    with database.read() as connection:
        assert get_order(connection, "order-1").order.amount == won[0]
        assert [row.event.payload["amount"] for row in events_of(connection, "order/order-1")] == won


def test_an_order_that_is_not_there_is_not_found(database: Database) -> None:
    with pytest.raises(NotFound, match="there is no order order-9"), database.read() as connection:
        get_order(connection, "order-9")


@pytest.mark.parametrize(
    "name", ["注文-7", "🛒-1", 'a"b\\c', "x'; DROP TABLE orders; --", "a" * 200, "🛒" * 200, "7", "a:placed"]
)
def test_any_valid_id_makes_the_whole_way(database: Database, name: str) -> None:
    with database.write() as connection:
        place_order(connection, order(id=name, sku=name), 1)
    with database.read() as connection:
        assert get_order(connection, name).order == order(id=name, sku=name)
        assert find_event(connection, f"{name}:placed").event.payload["order_id"] == name

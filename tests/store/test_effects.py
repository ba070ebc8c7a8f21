"""Effects of the built-in receivers: once an event, however often and by however many they are called."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import NotFound, WrongSettings
from contracts.events import ORDER_PLACED, Event
from contracts.orders import CURRENCIES
from receivers.base import Receiver
from receivers.builtin import Billing, Mail, Sales
from receivers.drill import Drillable
from receivers.registry import RECEIVERS, by_name, require
from store.effects import apply_sales, write_billing_entries, write_mail_messages
from store.engine import Database
from store.outbox import append_event, find_event
from store.schema import control, generations
from store.status import effect_counts, sales_by_currency
from tests.store.scenes import order, place, rows, scalar, together
from tests.waiting import wait_until

Write = Callable[[sa.Connection, list[Event]], None]
WRITES: list[Write] = [write_billing_entries, write_mail_messages, apply_sales]  # type: ignore[list-item]


def _events(database: Database, *numbers: int, **changes: Any) -> list[Event]:
    from store.orders import place_order

    with database.write() as connection:
        for number in numbers:
            place_order(connection, order(number, **changes), 1)
        return [find_event(connection, f"order-{number}").event for number in numbers]


def _counts(database: Database) -> tuple[int, int, int]:
    with database.read() as connection:
        counts = effect_counts(connection)
    return counts["billing"], counts["mail"], scalar(database, "SELECT count(*) FROM sales_applied")


def _totals(database: Database, generation: str = "initial") -> dict[str, tuple[int, int]]:
    with database.read() as connection:
        return sales_by_currency(connection, generation)


@pytest.mark.parametrize("receiver", [Billing(), Mail(), Sales()], ids=["billing", "mail", "sales"])
def test_a_receiver_that_is_called_twice_leaves_one_effect(database: Database, receiver: Receiver) -> None:
    events = _events(database, 1, 2, 3)
    for chosen in (events[:2], events, events[1:], []):
        with database.write() as connection:
            receiver.deliver_batch(connection, chosen)
            for event in chosen:
                receiver.deliver(connection, event)
    assert sorted(_counts(database)) == [0, 0, 3]
    assert _totals(database) == ({"JPY": (3, 600)} if receiver.name == "sales" else {})


@pytest.mark.parametrize("write", WRITES)
def test_an_event_that_is_twice_in_one_batch_counts_once(database: Database, write: Write) -> None:
    (event,) = _events(database, 1)
    with database.write() as connection:
        write(connection, [event, event])
    assert sum(_counts(database)) == 1
    assert _totals(database) in ({}, {"JPY": (1, 100)})


@pytest.mark.parametrize("write", WRITES)
def test_threads_that_write_the_same_effects_at_once_leave_one_each(database: Database, write: Write) -> None:
    events = _events(database, *range(1, 11))

    def call(chosen: list[Event]) -> None:
        with database.write() as connection:
            write(connection, chosen)

    assert together(*[lambda: call(events)] * 4) == [None] * 4
    assert sum(_counts(database)) == 10
    assert _totals(database) in ({}, {"JPY": (10, 5500)})


@pytest.mark.parametrize("write", WRITES)
def test_an_effect_that_is_rolled_back_is_written_by_the_next_call(database: Database, write: Write) -> None:
    events = _events(database, 1)
    with database.write() as connection:
        savepoint = connection.begin_nested()
        write(connection, events)
        savepoint.rollback()
    assert (_counts(database), _totals(database)) == ((0, 0, 0), {})
    with database.write() as connection:
        write(connection, events)
    assert sum(_counts(database)) == 1


def test_what_the_effects_say(database: Database) -> None:
    events = _events(database, 7)
    with database.write() as connection:
        for write in WRITES:
            write(connection, events)
    position = events[0].position
    assert rows(database, "SELECT * FROM billing_entries") == [(position, "order-7", 700, "JPY")]
    assert rows(database, "SELECT * FROM mail_messages") == [(position, "order-7", "We received your order order-7")]
    assert rows(database, "SELECT * FROM sales_applied") == [("initial", position, 700, "JPY")]


def test_sales_keeps_each_currency_apart(database: Database) -> None:
    currencies = sorted(CURRENCIES)[:30]
    events = [_events(database, number, currency=currency)[0] for number, currency in enumerate(currencies, 1)]
    events += [_events(database, 100 + n, currency=currencies[0], amount=10**12)[0] for n in range(3)]
    with database.write() as connection:
        apply_sales(connection, events)
    expected = {currency: (1, 100 * number) for number, currency in enumerate(currencies, 1)}
    expected[currencies[0]] = (4, 100 + 3 * 10**12)
    assert _totals(database) == expected


def _activate(connection: sa.Connection, old: str, new: str) -> None:
    connection.execute(sa.insert(generations).values(generation=new, state="SEALED", certificate="{}", created_at=1))
    for generation, state in ((old, "RETIRED"), (new, "ACTIVE")):
        connection.execute(sa.update(generations).where(generations.c.generation == generation).values(state=state))
    connection.execute(sa.update(control).values(active_generation=new))


def test_sales_goes_to_the_generation_that_is_active(database: Database) -> None:
    events = _events(database, 1, 2)
    with database.write() as connection:
        apply_sales(connection, events[:1])
        _activate(connection, "initial", "second")
        apply_sales(connection, events)  # once an event *in each generation*
    assert _totals(database) == {"JPY": (1, 100)}
    assert _totals(database, "second") == {"JPY": (2, 300)}


def test_sales_that_waited_for_an_activation_goes_to_the_new_generation(postgres: Database) -> None:
    events = _events(postgres, 1)

    def apply() -> None:
        with postgres.write() as connection:
            apply_sales(connection, events)

    thread = threading.Thread(target=apply, daemon=True)
    with postgres.write() as connection:
        _activate(connection, "initial", "second")
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: scalar(postgres, waiting), 60, "sales waits for the activation")
    thread.join(10)
    assert _totals(postgres) == {}
    assert _totals(postgres, "second") == {"JPY": (1, 100)}


def test_a_total_never_holds_half_a_yen(sqlite: Database) -> None:
    with sqlite.write() as connection:
        event, _ = append_event(
            connection,
            event_id="e",
            aggregate_id="a",
            event_type=ORDER_PLACED,
            payload={"order_id": "o", "amount": 1.5, "currency": "JPY"},
        )
    for write in (apply_sales, write_billing_entries):
        with sqlite.write() as connection, pytest.raises(sa.exc.IntegrityError, match="is_integer"):
            write(connection, [event])


def test_the_built_in_receivers_are_known_by_name() -> None:
    assert sorted(by_name()) == ["billing", "mail", "sales"]
    assert require("mail", by_name()).name == "mail"
    with pytest.raises(NotFound, match="there are billing, mail, sales"):
        require("fax", by_name())
    with pytest.raises(WrongSettings, match="two receivers are named mail: Mail of receivers"):
        by_name([*RECEIVERS, Mail()])
    with pytest.raises(WrongSettings, match=": Mail of receivers"):
        by_name([Drillable(receiver) for receiver in (*RECEIVERS, Mail())])


def test_placing_and_taking_touch_only_their_own_tables(database: Database) -> None:
    place(database, 1)
    assert (_counts(database), _totals(database)) == ((0, 0, 0), {})

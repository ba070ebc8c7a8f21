"""`audit`: clean on what the pipeline writes, and each break, made by hand, is found and named."""

from typing import Any

import pytest
import sqlalchemy as sa

from contracts.events import ORDER_PLACED
from store.audit import audit
from store.audit_findings import Audit, ReceiverCounts
from store.deliveries import mark_done, record_failure
from store.effects import apply_sales, write_billing_entries, write_mail_messages
from store.engine import Database
from store.generations import move
from store.jobs import begin_job, complete_charge, complete_ship, write_charge, write_shipment
from store.outbox import find_event, publish_again
from store.rebuild import (
    activate,
    begin_rebuild,
    expect_chunk,
    fix_history,
    replay_chunk,
    seal,
    store_certificate,
)
from tests.store.breaks import BREAKS, surgery
from tests.store.scenes import place, publish, register, spread

WRITES = {"billing": write_billing_entries, "mail": write_mail_messages, "sales": apply_sales}


def look(database: Database) -> Audit:
    with database.read() as connection:
        return audit(connection)


def broken(database: Database) -> dict[str, tuple[str, ...]]:
    """Invariant and sentence -> the ids that were named."""
    return {f"{each.invariant} {each.what}": each.ids for each in look(database).breaks}


def deliver(database: Database, receiver: str, *numbers: int) -> None:
    with database.write() as connection:
        events = [find_event(connection, f"order-{number}").event for number in numbers]
        WRITES[receiver](connection, events)
        mark_done(connection, receiver, [event.position for event in events])


def fail(database: Database, receiver: str, number: int, *, dead: bool) -> None:
    with database.write() as connection:
        event = find_event(connection, f"order-{number}").event
        due = None if dead else 100
        record_failure(connection, receiver, event.position, attempts=1, error="it broke", next_attempt_at=due, now=50)


def job(database: Database, name: str, *, ship: bool = True) -> None:
    with database.write() as connection:
        begin_job(connection, name, 100, 1, 2)
        write_charge(connection, name, 100, 3)
        complete_charge(connection, name, 100, 3)
        if ship:
            write_shipment(connection, name, 4)
            complete_ship(connection, name, 4)


def rebuild(database: Database, run: str = "run-1") -> None:
    """Into a new generation, without what proves it equal."""
    with database.write() as connection:
        rebuild_id = begin_rebuild(connection, run, kind="rebuild", target=None, resume=True, now=10).rebuild_id
        assert fix_history(connection, rebuild_id, 11)
        expect_chunk(connection, rebuild_id, "", 1000)
        replay_chunk(connection, rebuild_id, 0, 1000)
        seal(connection, rebuild_id)
        store_certificate(connection, rebuild_id, "{}")
        activate(connection, rebuild_id, 12)


@pytest.fixture
def shop(database: Database) -> Database:
    """Ten orders, all at every receiver; two jobs."""
    register(database, *WRITES, event_type=ORDER_PLACED)
    place(database, *range(1, 11))
    spread(database, *publish(database))
    for receiver in WRITES:
        deliver(database, receiver, *range(1, 11))
    job(database, "job-1")
    job(database, "job-2", ship=False)
    spread(database, *publish(database))
    return database


def test_a_new_database_is_clean(database: Database) -> None:
    assert look(database) == Audit(generation="initial")


def test_a_shop_with_everything_in_every_state_is_clean_and_counted(shop: Database) -> None:
    place(shop, 11, 12, 13, 14, 15)
    spread(shop, *publish(shop))
    place(shop, 16)  # waits for the relay
    publish(shop)
    place(shop, 17)  # is in the list, and this one waits
    deliver(shop, "mail", 11, 12, 13, 14, 15)
    deliver(shop, "sales", 11)
    fail(shop, "sales", 12, dead=False)
    fail(shop, "sales", 13, dead=True)
    fail(shop, "sales", 14, dead=True)
    surgery(
        shop,
        "UPDATE deliveries SET status = 'waived', reason = 'gone', settled_by = 'me' "
        "WHERE receiver = 'sales' AND aggregate_id = 'order/order-14'",
    )
    with shop.write() as connection:
        publish_again(connection, "order-1:placed")
    found = look(shop)
    assert found.breaks == []
    assert (found.orders, found.events, found.jobs, found.charges, found.shipments) == (17, 20, 2, 2, 1)
    assert found.sales == {"JPY": (11, 6600)}
    everything = {"pending": 0, "retrying": 0, "dead": 0, "waived": 0, "done": 10}
    assert found.receivers == [
        ReceiverCounts("billing", 17, 2, everything | {"pending": 5}),
        ReceiverCounts("mail", 17, 2, everything | {"done": 15}),
        ReceiverCounts("sales", 17, 2, everything | {"pending": 1, "retrying": 1, "dead": 1, "waived": 1, "done": 11}),
    ]


def test_a_rebuild_that_holds_dead_and_pending_events_is_clean_and_so_is_their_late_delivery(shop: Database) -> None:
    place(shop, 11, 12, 13)
    spread(shop, *publish(shop))
    fail(shop, "sales", 11, dead=True)
    fail(shop, "sales", 12, dead=False)
    rebuild(shop)
    found = look(shop)
    assert (found.breaks, found.generation, found.sales) == ([], "generation-1", {"JPY": (13, 9100)})
    deliver(shop, "sales", 12, 13)
    assert look(shop).breaks == []
    assert look(shop).sales == {"JPY": (13, 9100)}


def test_a_receiver_that_came_later_lacks_nothing(shop: Database) -> None:
    register(shop, "archive", event_type=ORDER_PLACED)
    assert look(shop).breaks == []
    surgery(  # as if sales had come after the fifth order
        shop,
        "UPDATE subscriptions SET since_position = 5 WHERE receiver = 'sales'",
        "DELETE FROM deliveries WHERE receiver = 'sales' AND position <= 5",
        "DELETE FROM sales_applied WHERE position <= 5",
        "UPDATE sales_totals SET orders = 5, amount = 4000",
    )
    assert look(shop).breaks == []
    rebuild(shop)
    found = look(shop)
    assert (found.breaks, found.sales) == ([], {"JPY": (10, 5500)})


def test_what_a_rebuild_put_in_must_be_there_taken_or_not(shop: Database) -> None:
    place(shop, 11, 12)
    spread(shop, *publish(shop))
    fail(shop, "sales", 11, dead=True)
    rebuild(shop)
    surgery(
        shop,
        "DELETE FROM sales_applied WHERE generation = 'generation-1' AND position = 14",
        "UPDATE sales_totals SET orders = 11, amount = amount - 1100 WHERE generation = 'generation-1'",
    )
    assert broken(shop) == {"I6 events rebuilt into generation-1 that it lacks": ("order-11:placed",)}


@pytest.mark.parametrize("state", ["pending", "retrying", "dead"])
def test_a_later_event_that_was_taken_before_an_earlier_one_is_named(shop: Database, state: str) -> None:
    register(shop, "log", event_type="order-shipped")
    surgery(
        shop,
        "UPDATE subscriptions SET since_position = 0 WHERE receiver = 'log'",
        "INSERT INTO subscriptions VALUES ('log', 'payment-captured', 0)",
        "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status, next_attempt_at) "
        f"VALUES ('log', 11, 'job/job-1', 1, '{state}', 5), ('log', 12, 'job/job-1', 2, 'done', NULL), "
        "('log', 13, 'job/job-2', 1, 'done', NULL)",
    )
    assert broken(shop) == {
        f"I4 events {state} at a receiver that took a later one of their aggregate": ("job-1:payment-captured",)
    }
    surgery(shop, "UPDATE deliveries SET status = 'pending' WHERE receiver = 'log' AND position = 12")
    assert broken(shop) == {}
    surgery(
        shop,
        "DELETE FROM deliveries WHERE receiver = 'log' AND position = 11",
        "UPDATE outbox SET fanned_out_at = NULL WHERE position = 11",
    )
    assert broken(shop) == {
        "I4 events without a delivery at a receiver that has a later one of their aggregate": (
            "job-1:payment-captured",
        )
    }


@pytest.mark.parametrize(("statements", "found"), [case[1:] for case in BREAKS], ids=[case[0] for case in BREAKS])
def test_a_break_is_named(shop: Database, statements: list[str], found: dict[str, tuple[str, ...]]) -> None:
    surgery(shop, *statements)
    try:
        assert broken(shop) == found
    finally:
        if statements[0].startswith("DROP"):
            surgery(
                shop,
                "DELETE FROM generations WHERE generation = 'generation-1'",
                "CREATE UNIQUE INDEX one_active_generation ON generations (state) WHERE state = 'ACTIVE'",
            )


def test_a_break_that_a_rebuild_left_behind_is_named(shop: Database) -> None:
    rebuild(shop)
    with shop.write() as connection:
        assert not move(connection, "generation-1", "BUILDING", "SEALED")
    surgery(shop, "DELETE FROM sales_applied WHERE generation = 'generation-1' AND position = 3")
    assert broken(shop) == {
        "I6 currencies whose totals in generation-1 are not the sum of its rows": (
            "JPY (rows 9 orders, 5,200, totals 10 orders, 5,500)",
        ),
        "I6 events done at sales that generation-1 lacks": ("order-3:placed",),
    }


def test_many_are_counted_and_twenty_are_named(shop: Database) -> None:
    place(shop, *range(100, 130))
    with shop.write() as connection:
        connection.execute(sa.text("DELETE FROM orders WHERE id LIKE 'order-1__'"))
    (found,) = look(shop).breaks
    assert (found.invariant, found.count, len(found.ids), found.ids[0]) == ("I1", 30, 20, "order-100:placed")


def test_what_is_unfinished_is_found_by_the_partial_indexes(sqlite: Database) -> None:
    statements: list[tuple[str, Any]] = []

    @sa.event.listens_for(sqlite.engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        statements.append((statement, parameters))

    register(sqlite, *WRITES, event_type=ORDER_PLACED)
    look(sqlite)
    asked = [each for each in statements if "deliveries.status" in each[0] or "fanned_out_at IS NULL" in each[0]]
    assert len(asked) > 15
    with sqlite.read() as connection:
        for statement, parameters in asked:
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            found = [line for line in plan if "INDEX deliveries_" in line or "INDEX outbox_" in line]
            whole = [line for line in plan if line in ("SCAN deliveries", "SCAN outbox")]
            assert (bool(found), whole) == (True, []), (statement, plan)

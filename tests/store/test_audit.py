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
from tests.store.scenes import place, publish, register, spread

WRITES = {"billing": write_billing_entries, "mail": write_mail_messages, "sales": apply_sales}


def look(database: Database) -> Audit:
    with database.read() as connection:
        return audit(connection)


def broken(database: Database) -> dict[str, tuple[str, ...]]:
    """Invariant and sentence -> the ids that were named."""
    return {f"{each.invariant} {each.what}": each.ids for each in look(database).breaks}


def surgery(database: Database, *statements: str) -> None:
    """What no code of ours would write."""
    with database.write() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


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
        shop, "UPDATE deliveries SET status = 'waived' WHERE receiver = 'sales' AND aggregate_id = 'order/order-14'"
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
    with shop.write() as connection:  # as if sales had come after the fifth order, and a rebuild held them all
        connection.exec_driver_sql("UPDATE subscriptions SET since_position = 5 WHERE receiver = 'sales'")
        connection.exec_driver_sql("DELETE FROM deliveries WHERE receiver = 'sales' AND position <= 5")
    assert look(shop).breaks == []
    surgery(
        shop,
        "DELETE FROM sales_applied WHERE position <= 5",
        "UPDATE sales_totals SET orders = 5, amount = 4000",
    )
    assert look(shop).breaks == []


BREAKS: list[tuple[str, list[str], dict[str, tuple[str, ...]]]] = [
    (
        "an order without its event",
        ["INSERT INTO orders VALUES ('order-99', 's', 1, 100, 'JPY', 1)"],
        {"I1 orders without their event": ("order-99",)},
    ),
    (
        "an event without its order",
        ["DELETE FROM orders WHERE id = 'order-3'"],
        {f"I1 {ORDER_PLACED} events without their order": ("order-3:placed",)},
    ),
    (
        "an order and an event that are each alone",
        [
            "DELETE FROM orders WHERE id = 'order-3'",
            "INSERT INTO orders VALUES ('order-03', 's', 1, 300, 'JPY', 1)",
        ],
        {
            "I1 orders without their event": ("order-03",),
            f"I1 {ORDER_PLACED} events without their order": ("order-3:placed",),
        },
    ),
    (
        "a delivery that is lost",
        [
            "DELETE FROM deliveries WHERE receiver = 'mail' AND position = 4",
            "DELETE FROM mail_messages WHERE position = 4",
        ],
        {"I2 events lost at mail: fanned out, and without a delivery": ("order-4:placed",)},
    ),
    (
        "a delivery of nothing",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 777, 'a', 1)"],
        {"I2 deliveries to mail of no event that it takes": ("position 777",)},
    ),
    (
        "a delivery of a type that it does not take",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 11, 'job/job-1', 1)"],
        {"I2 deliveries to mail of no event that it takes": ("job-1:payment-captured",)},
    ),
    (
        "a delivery to nobody",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('ghost', 1, 'order/order-1', 1)"],
        {"I2 deliveries to ghost of no event that it takes": ("order-1:placed",)},
    ),
    (
        "one delivery lost and one too many",
        [
            "DELETE FROM deliveries WHERE receiver = 'mail' AND position = 4",
            "DELETE FROM mail_messages WHERE position = 4",
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 777, 'a', 1)",
        ],
        {
            "I2 events lost at mail: fanned out, and without a delivery": ("order-4:placed",),
            "I2 deliveries to mail of no event that it takes": ("position 777",),
        },
    ),
    (
        "done without an effect",
        ["DELETE FROM billing_entries WHERE position = 2"],
        {"I3 deliveries done at billing without an effect": ("order-2:placed",)},
    ),
    (
        "an effect without done",
        ["UPDATE deliveries SET status = 'pending' WHERE receiver = 'mail' AND position = 2"],
        {"I3 effects of mail without a delivery that is done": ("order-2:placed",)},
    ),
    (
        "an effect of nothing",
        ["INSERT INTO mail_messages VALUES (888, 'order-888', 'x')"],
        {"I3 effects of mail without a delivery that is done": ("position 888",)},
    ),
    (
        "a charge of another amount",
        ["UPDATE charges SET amount = 99 WHERE job_id = 'job-1'"],
        {"I5 charges of another amount than their job's": ("job-1",)},
    ),
    (
        "a charge of nobody",
        ["INSERT INTO charges VALUES ('job-9', 100, 1)"],
        {"I5 charges without a job that records them": ("job-9",)},
    ),
    (
        "a shipment that is not recorded",
        ["INSERT INTO shipments VALUES ('job-2', 1)"],
        {"I5 shipments without a job that records them": ("job-2",)},
    ),
    (
        "shipped and not charged",
        [
            "DELETE FROM job_steps WHERE job_id = 'job-1' AND step = 'charge'",
            "DELETE FROM charges WHERE job_id = 'job-1'",
        ],
        {"I5 jobs shipped and not charged": ("job-1",)},
    ),
    (
        "steps of no job",
        ["INSERT INTO job_steps VALUES ('job-9', 'charge', 1, 1)"],
        {"I5 steps of no job": ("job-9",)},
    ),
    (
        "no active generation",
        ["UPDATE generations SET state = 'RETIRED'"],
        {"I6 generations ACTIVE, where initial is the one named as active": ()},
    ),
    (
        "two active generations",
        [
            "DROP INDEX one_active_generation",
            "INSERT INTO generations VALUES ('generation-1', 'ACTIVE', '{}', 1)",
        ],
        {"I6 generations ACTIVE, where initial is the one named as active": ("generation-1", "initial")},
    ),
    (
        "totals that are not the sum",
        ["UPDATE sales_totals SET amount = amount + 1"],
        {
            "I6 currencies whose totals in initial are not the sum of its rows": (
                "JPY (rows 10 orders, 5,500, totals 10 orders, 5,501)",
            )
        },
    ),
    (
        "totals of a currency that nobody paid in",
        ["INSERT INTO sales_totals VALUES ('initial', 'EUR', 1, 1)"],
        {
            "I6 currencies whose totals in initial are not the sum of its rows": (
                "EUR (rows nothing, totals 1 orders, 1)",
            )
        },
    ),
    (
        "done at sales and not in the generation",
        [
            "DELETE FROM sales_applied WHERE position = 7",
            "UPDATE sales_totals SET amount = amount - 700, orders = orders - 1",
        ],
        {"I6 events done at sales that initial lacks": ("order-7:placed",)},
    ),
    (
        "a row that the history does not have",
        [
            "INSERT INTO sales_applied VALUES ('initial', 999, 1, 'JPY')",
            "UPDATE sales_totals SET amount = amount + 1, orders = orders + 1",
        ],
        {"I6 rows of initial that the history does not have": ("position 999",)},
    ),
    (
        "one row for another, right in count and sum",
        [
            "UPDATE sales_applied SET position = 999 WHERE position = 7",
        ],
        {
            "I6 events done at sales that initial lacks": ("order-7:placed",),
            "I6 rows of initial that the history does not have": ("position 999",),
        },
    ),
    (
        "another amount, and totals that agree with it",
        [
            "UPDATE sales_applied SET amount = 701 WHERE position = 7",
            "UPDATE sales_totals SET amount = amount + 1",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed",)},
    ),
    (
        "two amounts that changed places",
        [
            "UPDATE sales_applied SET amount = 1500 - amount WHERE position IN (7, 8)",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed", "order-8:placed")},
    ),
    (
        "another currency",
        [
            "UPDATE sales_applied SET currency = 'EUR' WHERE position = 7",
            "UPDATE sales_totals SET amount = amount - 700, orders = orders - 1",
            "INSERT INTO sales_totals VALUES ('initial', 'EUR', 1, 700)",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed",)},
    ),
    (
        "an order of another amount than its event",
        ["UPDATE orders SET amount = 5 WHERE id = 'order-7'"],
        {"I1 orders with another amount than their event": ("order-7",)},
    ),
]


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
            assert any(f"INDEX {name}" in plan[0] for name in ("deliveries_", "outbox_")), (statement, plan)

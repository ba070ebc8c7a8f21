"""The control row, the lease, and what a person is told."""

import threading
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from contracts.errors import NotFound
from store.clock import iso, now_ms
from store.control import clear_lease, hold_lease, initialize, read_control
from store.engine import Database
from store.orders import place_order
from store.outbox import pending_events
from store.schema import metadata
from store.status import (
    OutboxStatus,
    count_invalid,
    count_orders,
    effect_counts,
    outbox_status,
    receiver_status,
    sales_by_currency,
)
from tests.store.scenes import (
    append,
    batch,
    delivered_to,
    order,
    place,
    publish,
    register,
    rows,
    scalar,
    spread,
    together,
)
from tests.waiting import wait_until


@pytest.fixture
def bare(database: Database) -> Database:
    """Without any table."""
    with database.write() as connection:
        metadata.drop_all(connection)
    yield database
    with database.write() as connection:
        initialize(connection, 1)


def _snapshot(database: Database) -> list[object]:
    return [rows(database, sa.select(table)) for table in metadata.sorted_tables]


def test_a_second_init_changes_nothing(database: Database) -> None:
    place(database, 1)
    delivered_to(database, "one")
    with database.write() as connection:
        hold_lease(connection, 99)
        connection.execute(sa.text("UPDATE control SET intake = 'PAUSED', epoch = 7"))
    before = _snapshot(database)
    with database.write() as connection:
        initialize(connection, 12345)
    assert _snapshot(database) == before


def test_init_after_another_generation_became_active_changes_nothing(database: Database) -> None:
    with database.write() as connection:
        for statement in (
            "UPDATE generations SET state = 'RETIRED'",
            "INSERT INTO generations (generation, state, certificate, created_at) VALUES ('g2', 'ACTIVE', '{}', 2)",
            "UPDATE control SET active_generation = 'g2'",
        ):
            connection.execute(sa.text(statement))
    before = _snapshot(database)
    with database.write() as connection:
        initialize(connection, 9)
    assert _snapshot(database) == before


def test_threads_that_init_an_empty_database_at_once_all_succeed(bare: Database) -> None:
    def call() -> None:
        with bare.write() as connection:
            initialize(connection, 5)

    assert together(*[call] * 4) == [None] * 4
    with bare.read() as connection:
        control = read_control(connection)
    assert (control.intake, control.active_generation, control.epoch, control.hot_until) == ("OPEN", "initial", 0, 0)


def test_without_its_row_the_database_says_what_to_run(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.text("DELETE FROM control"))
        with pytest.raises(NotFound, match=r"starter\.py init"):
            read_control(connection)
        with pytest.raises(NotFound, match=r"starter\.py init"):
            place_order(connection, order(1), 1)


def test_a_lease_is_prolonged_and_never_shortened(database: Database) -> None:
    for until, expected in ((100, 100), (300, 300), (200, 300)):
        with database.write() as connection:
            hold_lease(connection, until)
            assert read_control(connection).hot_until == expected
    for _ in range(2):
        with database.write() as connection:
            clear_lease(connection)
            assert read_control(connection).hot_until == 0


def test_the_relay_goes_to_rest_only_after_the_intakes_that_trusted_it(postgres: Database) -> None:
    """Else an order that read the lease as held would be seen by nobody: not by the drain, and it sent no wake."""
    with postgres.write() as connection:
        hold_lease(connection, 10**6)
    seen: list[str] = []

    def rest() -> None:
        with postgres.write() as connection:
            clear_lease(connection)
            seen.extend(event_id for _, event_id in pending_events(connection, 10))

    thread = threading.Thread(target=rest, daemon=True)
    with postgres.write() as intake:
        placed = place_order(intake, order(1), now=5)
        assert not placed.cold
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
        wait_until(lambda: scalar(postgres, waiting), 60, "the relay waits for the intake")
        assert seen == []
    thread.join(10)
    assert seen == ["order-1:placed"]
    with postgres.write() as connection:
        assert place_order(connection, order(2), now=5).cold  # from here on intake wakes it


def test_intakes_run_beside_each_other(postgres: Database) -> None:
    with ExitStack() as stack:
        for number in range(1, 4):
            place_order(stack.enter_context(postgres.write()), order(number), 1)
    assert scalar(postgres, "SELECT count(*) FROM orders") == 3


def test_however_intake_and_rest_meet_no_order_is_left_unseen_and_unannounced(database: Database) -> None:
    unseen: set[str] = set()
    announced: set[str] = set()

    def intake(start: int) -> None:
        for number in range(start, start + 15):
            with database.write() as connection:
                cold = place_order(connection, order(number), now=5).cold
            if cold:
                announced.add(f"order-{number}:placed")

    def relay() -> None:
        for _ in range(15):
            with database.write() as connection:
                hold_lease(connection, 10**6)
            publish(database)
            with database.write() as connection:
                clear_lease(connection)
                unseen.update(event_id for _, event_id in pending_events(connection, 1000))

    assert together(lambda: intake(1), lambda: intake(100), lambda: intake(200), relay) == [None] * 4
    with database.read() as connection:
        left = {event_id for _, event_id in pending_events(connection, 1000)}
    assert left <= announced | unseen


def test_the_counts_follow_an_event_through(database: Database) -> None:
    def outbox() -> OutboxStatus:
        with database.read() as connection:
            return outbox_status(connection)

    register(database, "one", "two")
    assert outbox() == OutboxStatus(0, 0, 0)
    append(database, "a", 1, 2, 3)
    assert outbox() == OutboxStatus(pending=3, in_flight=0, fanned_out=0)
    names = publish(database)
    assert outbox() == OutboxStatus(pending=0, in_flight=3, fanned_out=0)
    spread(database, names[0])
    assert (outbox(), outbox().total) == (OutboxStatus(pending=0, in_flight=2, fanned_out=1), 3)
    with database.read() as connection:
        one, two = receiver_status(connection)
        assert (one.receiver, two.receiver) == ("one", "two")
        assert one.counts == {"pending": 1, "retrying": 0, "done": 0, "dead": 0, "waived": 0}
        assert (one.held_since, one.reason, one.last_progress) == (None, None, None)
        assert (count_orders(connection), count_invalid(connection)) == (0, 0)
        assert effect_counts(connection) == {"billing": 0, "mail": 0}
        assert sales_by_currency(connection, "initial") == {}
    assert batch(database, "one") == ["a-1"]


def test_times_are_shown_in_utc() -> None:
    assert iso(None) is None
    assert iso(0) == "1970-01-01T00:00:00.000Z"
    assert iso(1_796_063_400_123) == "2026-11-30T18:30:00.123Z"
    assert now_ms() > 1_700_000_000_000

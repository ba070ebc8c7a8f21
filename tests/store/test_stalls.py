"""What a backlog waits for, by stage, and from when on it is a stall."""

import pytest
import sqlalchemy as sa

from contracts.events import ORDER_PLACED
from store.control import hold_lease
from store.deliveries import mark_done, record_failure
from store.engine import Database
from store.outbox import find_event, publish_again
from store.receivers import hold_receiver, note_progress
from store.stalls import STALL_MS, Backlog, backlogs, oldest_by_state
from tests.store.scenes import append, place, publish, register, spread

NOW = 10 * STALL_MS


def found(database: Database, now: int = NOW) -> list[Backlog]:
    with database.read() as connection:
        return backlogs(connection, now)


def fail(database: Database, event_id: str, due: int | None) -> None:
    with database.write() as connection:
        position = find_event(connection, event_id).event.position
        record_failure(connection, "mail", position, attempts=1, error="it broke", next_attempt_at=due, now=50)


def test_an_empty_shop_waits_for_nothing(database: Database) -> None:
    register(database, "mail")
    assert found(database) == []


def test_an_order_that_nobody_relays_stalls_after_a_minute_unless_the_relay_drains(database: Database) -> None:
    register(database, "mail", event_type=ORDER_PLACED)
    place(database, 1, 2)
    (waiting,) = found(database)
    assert (waiting.stage, waiting.event_id, waiting.since, waiting.progress) == ("relay", "order-1:placed", 1, None)
    assert "does not drain" in waiting.waits_for
    assert not waiting.stalled(STALL_MS)
    assert waiting.stalled(1 + STALL_MS)
    with database.write() as connection:
        hold_lease(connection, NOW + 5)
    (waiting,) = found(database)
    assert waiting.waits_for == "the relay, which drains"
    assert not waiting.stalled(NOW)


def test_an_event_of_no_order_has_no_age_and_is_no_stall(database: Database) -> None:
    append(database, "a", 1)
    (waiting,) = found(database)
    assert (waiting.since, waiting.stalled(NOW)) == (None, False)
    assert waiting.sentence() == f"a-1 waits at relay for {waiting.waits_for}"


def test_the_fan_out_stalls_when_nothing_before_it_moves(database: Database) -> None:
    register(database, "mail")
    append(database, "a", 1)
    spread(database, *publish(database, now=10), now=20)
    append(database, "b", 1, 2)
    publish(database, now=30)
    fan_out, _mail = found(database)
    assert (fan_out.stage, fan_out.event_id, fan_out.since, fan_out.progress) == ("fan-out", "b-1", 30, 20)
    assert not fan_out.stalled(30 + STALL_MS - 1)
    assert fan_out.stalled(30 + STALL_MS)


@pytest.fixture
def shop(database: Database) -> Database:
    """Three events of one aggregate and one of another, pending at `mail` since 20."""
    register(database, "mail")
    append(database, "a", 1, 2, 3)
    append(database, "b", 1)
    spread(database, *publish(database, now=10), now=20)
    return database


def test_a_receiver_whose_turn_it_is_waits_for_a_worker(shop: Database) -> None:
    (mail,) = found(shop)
    assert (mail.stage, mail.event_id, mail.since, mail.can_go_on) == ("mail", "a-1", 20, True)
    assert mail.sentence().startswith("a-1 waits at mail since 1970-01-01T00:00:00.020Z for its turn")
    assert mail.stalled(NOW)
    with shop.write() as connection:
        note_progress(connection, "mail", NOW - STALL_MS + 1)
    (mail,) = found(shop)
    assert not mail.stalled(NOW)
    assert mail.stalled(NOW + 1)


def test_a_receiver_on_hold_waits_to_be_available(shop: Database) -> None:
    with shop.write() as connection:
        hold_receiver(connection, "mail", "connection refused", 40)
    (mail,) = found(shop)
    assert (mail.event_id, mail.can_go_on) == ("a-1", True)  # it is probed, so its drain does not rest
    assert mail.waits_for.endswith("on hold since 1970-01-01T00:00:00.040Z: connection refused")


def test_what_fails_waits_for_its_next_attempt_and_what_is_behind_a_dead_letter_for_a_person(shop: Database) -> None:
    fail(shop, "a-1", due=77)
    with shop.write() as connection:
        mark_done(connection, "mail", [find_event(connection, "b-1").event.position])
    (mail,) = found(shop)
    assert (mail.event_id, mail.can_go_on) == ("a-1", False)
    assert mail.waits_for == "attempt 2, due 1970-01-01T00:00:00.077Z; the last one failed: it broke"
    fail(shop, "a-1", due=None)
    (mail,) = found(shop)
    assert (mail.event_id, mail.can_go_on) == ("a-2", False)
    assert mail.waits_for == "a-1, which is dead; redrive or waive it"
    with shop.read() as connection:
        assert oldest_by_state(connection, "mail") == {"pending": 20, "dead": 20}


def test_dead_letters_with_nothing_behind_them_are_no_backlog(shop: Database) -> None:
    for event_id in ("b-1", "a-3", "a-2", "a-1"):
        fail(shop, event_id, due=None)
    assert found(shop) == []


def test_an_event_that_was_published_again_is_as_old_as_its_first_push(shop: Database) -> None:
    with shop.write() as connection:
        publish_again(connection, "a-1")
    relay, mail = found(shop)
    assert (relay.stage, relay.event_id) == ("relay", "a-1")
    assert (mail.event_id, mail.since) == ("a-1", 10)


def test_a_backlog_is_found_without_a_walk_over_what_is_done(sqlite: Database) -> None:
    statements = []

    @sa.event.listens_for(sqlite.engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> None:
        statements.append((statement, parameters))

    register(sqlite, "mail")
    statements.clear()
    assert found(sqlite) == []
    with sqlite.read() as connection:
        oldest_by_state(connection, "mail")
        asked = [each for each in statements if "deliveries" in each[0]]
        assert len(asked) > 4
        for statement, parameters in asked:
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert not [step for step in plan if "PRIMARY KEY (receiver=?)" in step], statement

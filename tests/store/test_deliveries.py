"""Deliveries: the order rule, exactly one `done`, attempts and dead letters, and who gets a run of its own."""

from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import NotFound
from store.deliveries import (
    Retrying,
    claim_runs,
    deliveries_of,
    first_next,
    forget_runs,
    load_delivery,
    mark_done,
    next_batch,
    next_probe,
    record_failure,
    retrying_of,
    waits_behind,
)
from store.engine import Database
from store.outbox import mark_published
from store.receivers import lock_receiver, note_progress
from tests.store.scenes import append, batch, delivered_to, publish, register, rows, scalar, spread, together


def _done(database: Database, receiver: str, *positions: int) -> None:
    with database.write() as connection:
        mark_done(connection, receiver, positions)


def _fail(database: Database, receiver: str, position: int, next_attempt_at: int | None, **changes: Any) -> None:
    values: dict[str, Any] = {"attempts": 1, "error": "it broke", "now": 50} | changes
    with database.write() as connection:
        record_failure(connection, receiver, position, next_attempt_at=next_attempt_at, **values)


def _state(database: Database, receiver: str) -> list[Any]:
    return [
        status
        for (status,) in rows(
            database, f"SELECT status FROM deliveries WHERE receiver = '{receiver}' ORDER BY position"
        )
    ]


def _claim(database: Database, most_open: int, *, now: int = 10_000, overdue: int = 0) -> list[str]:
    with database.write() as connection:
        return [event_id for event_id, _ in claim_runs(connection, "one", most_open, now=now, overdue=overdue)]


def _retrying(database: Database) -> Retrying:
    with database.read() as connection:
        return retrying_of(connection, "one")


def test_pending_events_come_in_order_and_no_more_than_asked_for(database: Database) -> None:
    delivered_to(database, "one", "two", count=5)
    assert batch(database, "one", 3) == ["a-1", "a-2", "a-3"]
    assert batch(database, "two") == [f"a-{n}" for n in range(1, 6)]
    assert batch(database, "nobody") == []


def test_what_is_done_is_not_taken_again_and_other_receivers_do_not_notice(database: Database) -> None:
    events = delivered_to(database, "one", "two")
    _done(database, "one", events[0].position, events[1].position)
    assert batch(database, "one") == ["a-3"]
    assert batch(database, "two") == ["a-1", "a-2", "a-3"]
    with database.read() as connection:
        assert first_next(connection, "one") == events[2].position
        _done(database, "one", events[2].position)
    with database.read() as connection:
        assert first_next(connection, "one") is None


@pytest.mark.parametrize("next_attempt_at", [100, None], ids=["retrying", "dead"])
def test_what_follows_a_failed_event_waits_and_other_aggregates_go_on(
    database: Database, next_attempt_at: int | None
) -> None:
    events = delivered_to(database, "one", "two")
    append(database, "b", 1, 2)
    spread(database, *publish(database))
    _fail(database, "one", events[1].position, next_attempt_at)
    assert batch(database, "one") == ["a-1", "b-1", "b-2"]
    assert batch(database, "two") == ["a-1", "a-2", "a-3", "b-1", "b-2"]
    _done(database, "one", events[0].position)
    append(database, "a", 4)
    spread(database, *publish(database))
    assert batch(database, "one") == ["b-1", "b-2"]  # also what comes later


def test_after_a_retried_event_is_done_those_behind_it_go_on(database: Database) -> None:
    events = delivered_to(database, "one")
    _fail(database, "one", events[0].position, 100)
    assert batch(database, "one") == []
    _done(database, "one", events[0].position)
    assert batch(database, "one") == ["a-2", "a-3"]
    assert rows(database, "SELECT next_attempt_at, has_run FROM deliveries WHERE seq = 1") == [(None, 0)]


def test_a_waived_event_blocks_nothing(database: Database) -> None:
    delivered_to(database, "one")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE deliveries SET status = 'waived' WHERE seq = 1")
    assert batch(database, "one") == ["a-2", "a-3"]


def test_an_event_waits_behind_the_earliest_unfinished_one(database: Database) -> None:
    events = delivered_to(database, "one")

    def ahead(number: int) -> str | None:
        with database.read() as connection:
            return waits_behind(connection, "one", events[number - 1])

    assert [ahead(1), ahead(2), ahead(3)] == [None, "a-1", "a-1"]
    _fail(database, "one", events[0].position, None)
    assert ahead(3) == "a-1"
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE deliveries SET status = 'waived' WHERE seq = 1")
    assert [ahead(2), ahead(3)] == [None, "a-2"]
    _done(database, "one", events[1].position)
    assert ahead(3) is None


def test_done_twice_is_refused_with_the_whole_transaction(database: Database) -> None:
    events = delivered_to(database, "one")
    _done(database, "one", events[0].position)
    with pytest.raises(RuntimeError, match="a twin took 1 delivery of one"):
        _done(database, "one", events[0].position, events[1].position)
    assert _state(database, "one") == ["done", "pending", "pending"]
    with pytest.raises(RuntimeError):
        _done(database, "nobody", events[0].position)
    _done(database, "one")  # nothing is nothing


@pytest.mark.parametrize("status", ["dead", "waived", "done"])
def test_a_settled_delivery_is_neither_done_nor_failed_once_more(database: Database, status: str) -> None:
    events = delivered_to(database, "one", count=1)
    with database.write() as connection:
        connection.exec_driver_sql(f"UPDATE deliveries SET status = '{status}'")
    before = rows(database, "SELECT * FROM deliveries")
    with pytest.raises(RuntimeError):
        _done(database, "one", events[0].position)
    _fail(database, "one", events[0].position, 100, attempts=3)
    assert rows(database, "SELECT * FROM deliveries") == before


def test_of_two_twins_that_take_the_same_batch_one_commits(database: Database) -> None:
    delivered_to(database, "one", count=5)

    def drain(lock: bool) -> int:
        with database.write() as connection:
            if lock:
                lock_receiver(connection, "one")
            events = next_batch(connection, "one", 100)
            mark_done(connection, "one", [event.position for event in events])
            return len(events)

    assert sorted(together(*[lambda: drain(True)] * 4)) == [0, 0, 0, 5]
    append(database, "b", 1)
    spread(database, *publish(database))
    results = together(*[lambda: drain(False)] * 4)  # even without the lock
    assert [result for result in results if isinstance(result, int) and result] == [1]
    assert all(isinstance(result, RuntimeError) for result in results if not isinstance(result, int))


def test_a_failed_attempt_is_recorded_and_the_last_one_is_a_dead_letter(database: Database) -> None:
    events = delivered_to(database, "one", count=2)
    _fail(database, "one", events[0].position, 100, attempts=1, error="first")
    with database.write() as connection:
        delivery = load_delivery(connection, "one", "a-1")
    assert (delivery.status, delivery.attempts, delivery.next_attempt_at, delivery.last_error) == (
        "retrying",
        1,
        100,
        "first",
    )
    assert _claim(database, 10) == ["a-1"]
    _fail(database, "one", events[0].position, 200, attempts=2)
    assert scalar(database, "SELECT has_run FROM deliveries WHERE seq = 1") == 1  # its run goes on
    _fail(database, "one", events[0].position, None, attempts=3, error="last", now=77)
    found = rows(
        database,
        "SELECT status, attempts, next_attempt_at, last_error, settled_at, has_run FROM deliveries WHERE seq=1",
    )
    assert found == [("dead", 3, None, "last", 77, 0)]
    assert _claim(database, 10, now=10**6, overdue=10**6) == []


@pytest.mark.parametrize("error", ["nul \0 here", "half \ud800 a pair", "x" * 10**6, "", "多" * 5000, "two\nlines"])
def test_whatever_an_error_says_it_is_recorded(database: Database, error: str) -> None:
    events = delivered_to(database, "one", count=1)
    _fail(database, "one", events[0].position, None, error=error)
    assert _state(database, "one") == ["dead"]
    stored = scalar(database, "SELECT last_error FROM deliveries")
    assert stored[:3] == error[:3]
    assert len(stored) <= 4000


def test_a_delivery_that_is_not_there_is_not_found(database: Database) -> None:
    delivered_to(database, "one", count=1)
    for receiver, event_id in (("two", "a-1"), ("one", "a-9")):
        with database.write() as connection, pytest.raises(NotFound, match="event show a-"):
            load_delivery(connection, receiver, event_id)


def test_all_deliveries_of_an_event_are_listed_by_receiver(database: Database) -> None:
    events = delivered_to(database, "two", "one", count=1)
    _done(database, "two", events[0].position)
    with database.read() as connection:
        found = deliveries_of(connection, "a-1")
        assert deliveries_of(connection, "a-9") == []
    assert [(delivery.receiver, delivery.status) for delivery in found] == [("one", "pending"), ("two", "done")]
    assert found[0].event == events[0]


def test_a_delivery_under_way_holds_neither_the_relay_nor_other_receivers_up(postgres: Database) -> None:
    events = delivered_to(postgres, "one", "two", count=1)
    with postgres.write() as slow:
        load_delivery(slow, "one", "a-1")
        with postgres.write() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
            mark_published(connection, [events[0].position], 9)
            mark_done(connection, "two", [events[0].position])
    assert _state(postgres, "two") == ["done"]


def test_a_second_run_of_one_delivery_waits_and_sees_what_the_first_did(database: Database) -> None:
    delivered_to(database, "one", count=1)

    def take() -> str:
        with database.write() as connection:
            delivery = load_delivery(connection, "one", "a-1")
            if delivery.status == "pending":
                mark_done(connection, "one", [delivery.event.position])
            return delivery.status

    assert sorted(together(*[take] * 4)) == ["done", "done", "done", "pending"]


def _failing(database: Database, count: int) -> None:
    """`count` events of as many aggregates, all retrying; the last one is due first."""
    register(database, "one")
    for number in range(1, count + 1):
        event = append(database, f"agg{number}", 1)[0]
        spread(database, event.event_id)
        _fail(database, "one", event.position, 1000 - number)


def test_a_run_is_claimed_when_its_attempt_is_due_and_not_before(database: Database) -> None:
    _failing(database, 3)  # due at 997, 998, 999
    assert _claim(database, 10, now=996) == []
    assert scalar(database, "SELECT count(*) FROM deliveries WHERE has_run = 1") == 0
    assert _claim(database, 10, now=998) == ["agg3-1", "agg2-1"]
    assert _claim(database, 10, now=998) == []
    assert _claim(database, 10, now=999) == ["agg1-1"]


def test_when_the_next_run_is_to_be_claimed_is_known_without_a_clock(database: Database) -> None:
    assert _retrying(database) == Retrying(None, 0, None)
    _failing(database, 3)
    found = _retrying(database)
    assert found == Retrying(997, 0, None)
    assert (found.next_due(1), found.next_due(0)) == (997, None)
    assert [found.want_runs(1, now, 0) for now in (996, 997)] == [False, True]
    _claim(database, 2, now=4000)
    found = _retrying(database)
    assert found == Retrying(999, 2, 4000)
    assert (found.next_due(3), found.next_due(2)) == (999, None)  # no room, whatever is due
    assert [found.want_runs(2, 5000, overdue) for overdue in (4000, 4001)] == [False, True]


def test_a_claim_names_aggregate_and_event_and_again_what_has_lost_its_run(database: Database) -> None:
    events = delivered_to(database, "one", count=1)
    _fail(database, "one", events[0].position, 1234)
    with database.write() as connection:
        assert claim_runs(connection, "one", 1, now=1234, overdue=0) == [("a-1", "a")]
        assert claim_runs(connection, "one", 1, now=9999, overdue=1234) == []  # it has its run, and is not overdue
        assert claim_runs(connection, "one", 1, now=9999, overdue=1235) == [("a-1", "a")]


def test_when_temporal_has_lost_its_runs_each_gets_one_when_it_is_due(database: Database) -> None:
    _failing(database, 2)
    assert _claim(database, 1, now=1500) == ["agg2-1"]
    with database.write() as connection:
        forget_runs(connection)
    assert _claim(database, 2, now=998) == []
    assert _claim(database, 2, now=999) == ["agg1-1"]
    assert _claim(database, 2, now=1500) == ["agg2-1"]


def test_runs_are_claimed_oldest_due_first_up_to_the_cap(database: Database) -> None:
    _failing(database, 5)
    assert _claim(database, 2) == ["agg5-1", "agg4-1"]
    assert _claim(database, 2) == []
    assert _claim(database, 3) == ["agg3-1"]
    position = scalar(database, "SELECT position FROM outbox WHERE event_id = 'agg5-1'")
    _done(database, "one", position)
    assert _claim(database, 3) == ["agg2-1"]  # one ended, so one begins


def test_a_run_that_should_have_tried_long_ago_is_named_again(database: Database) -> None:
    _failing(database, 3)
    assert _claim(database, 1, now=1000) == ["agg3-1"]
    assert _claim(database, 2, now=2000) == ["agg2-1"]
    assert _claim(database, 2, now=3000, overdue=1000) == []  # tries since 1000: not yet overdue
    assert _claim(database, 2, now=3000, overdue=1001) == ["agg3-1"]
    assert _claim(database, 2, now=4000, overdue=2500) == ["agg2-1"]  # the other has a new one
    assert _claim(database, 3, now=6000, overdue=5000) == ["agg1-1", "agg3-1", "agg2-1"]


def test_one_that_waited_long_for_its_place_has_not_lost_its_run_when_it_is_claimed(database: Database) -> None:
    """Three hundred that failed at once had twenty to thirty starts each."""
    _failing(database, 6)
    for _ in range(3):
        first, second = _claim(database, 2, now=100_000, overdue=88_000)
        assert [_claim(database, 2, now=100_000 + later, overdue=88_000 + later) for later in (0, 1000, 12_000)] == [
            [],
            [],
            [],
        ]
        for event_id in (first, second):
            _done(database, "one", scalar(database, f"SELECT position FROM outbox WHERE event_id = '{event_id}'"))


def test_a_cap_of_none_claims_none(database: Database) -> None:
    _failing(database, 2)
    assert _claim(database, 0, overdue=2000) == []


def test_claims_of_two_threads_never_exceed_the_cap(database: Database) -> None:
    _failing(database, 12)
    results = together(*[lambda: _claim(database, 4)] * 4)
    assert sum(len(result) for result in results) == 4
    assert scalar(database, "SELECT count(*) FROM deliveries WHERE has_run = 1") == 4


def test_claims_are_of_one_receiver(database: Database) -> None:
    events = delivered_to(database, "one", "two", count=1)
    _fail(database, "two", events[0].position, 10)
    assert _claim(database, 10) == []


def test_progress_is_noted_for_one_receiver(database: Database) -> None:
    register(database, "one", "two")
    with database.write() as connection:
        note_progress(connection, "one", 77)
    assert rows(database, "SELECT receiver, last_progress FROM receivers ORDER BY 1") == [("one", 77), ("two", None)]


def test_work_is_found_without_a_walk_over_what_is_done(sqlite: Database) -> None:
    """A receiver that has taken a million events looks for the next one many times a second."""
    statements: list[tuple[str, Any]] = []

    @sa.event.listens_for(sqlite.engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        statements.append((statement, parameters))

    with sqlite.write() as connection:
        next_batch(connection, "mail", 10)
        next_probe(connection, "mail", 0)
        next_probe(connection, "mail", 5)
        retrying_of(connection, "mail")
        claim_runs(connection, "mail", 8, now=9, overdue=1)
        asked = [each for each in statements if each[0].startswith("SELECT") and "deliveries" in each[0]]
        assert len(asked) > 5
        for statement, parameters in asked:
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert not [step for step in plan if "PRIMARY KEY (receiver=?)" in step], statement

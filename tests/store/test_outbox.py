"""The outbox: events of an aggregate in order, found by state, pushed again only when they are lost."""

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import Conflict, NotFound
from store.engine import Database
from store.outbox import (
    append_event,
    events_of,
    find_event,
    lost_events,
    mark_published,
    pending_events,
    publish_again,
    reset_to_pending,
)
from tests.store.scenes import TYPE, append, place, publish, rows, spread, together
from tests.waiting import wait_until


def _pending(database: Database, limit: int = 1000) -> list[str]:
    with database.read() as connection:
        return [event_id for _, event_id in pending_events(connection, limit)]


def _lost(database: Database, before: int, head: str | None, limit: int = 1000) -> list[str]:
    names = dict(rows(database, "SELECT position, event_id FROM outbox"))
    with database.read() as connection:
        return [names[position] for position in lost_events(connection, before=before, head=head, limit=limit)]


def _append_one(connection: sa.Connection, event_id: str, aggregate: str, **changes: Any) -> Any:
    values = {"event_id": event_id, "aggregate_id": aggregate, "event_type": TYPE, "payload": {"n": 1}} | changes
    return append_event(connection, **values)


def test_seq_counts_from_one_within_each_aggregate(database: Database) -> None:
    append(database, "a", 1, 2)
    append(database, "b", 1)
    append(database, "a", 3)
    assert rows(database, "SELECT event_id, seq FROM outbox ORDER BY position") == [
        ("a-1", 1),
        ("a-2", 2),
        ("b-1", 1),
        ("a-3", 3),
    ]


def test_the_same_event_again_changes_nothing_and_says_so(database: Database) -> None:
    with database.write() as connection:
        first, new = _append_one(connection, "e", "a")
        assert new
    with database.write() as connection:
        assert _append_one(connection, "e", "a") == (first, False)
        assert _append_one(connection, "e", "a") == (first, False)
    assert len(rows(database, "SELECT 1 FROM outbox")) == 1


@pytest.mark.parametrize(
    "change", [{"aggregate_id": "b"}, {"event_type": "other"}, {"payload": {"n": 2}}, {"payload": {}}]
)
def test_an_event_id_that_tells_of_something_else_is_a_conflict(database: Database, change: dict[str, Any]) -> None:
    with database.write() as connection:
        _append_one(connection, "e", "a")
    with database.write() as connection, pytest.raises(Conflict, match="event e"):
        _append_one(connection, "e", "a", **change)


def test_two_threads_with_one_event_id_make_one_event_or_a_conflict(database: Database) -> None:
    def call(aggregate: str) -> bool:
        with database.write() as connection:
            return bool(_append_one(connection, "e", aggregate)[1])

    same = together(*[lambda: call("a")] * 4)
    assert sorted(same) == [False, False, False, True]
    results = together(*[lambda name=name: call(name) for name in "abcabc"])
    assert [type(result) for result in results] == [bool, Conflict, Conflict] * 2


def test_two_threads_with_one_new_id_for_two_aggregates_get_one_event_and_conflicts(database: Database) -> None:
    def call(aggregate: str) -> bool:
        with database.write() as connection:
            return bool(_append_one(connection, "e", aggregate)[1])

    results = together(*[lambda name=name: call(name) for name in "abcdef"])
    assert sorted(type(result).__name__ for result in results) == ["Conflict"] * 5 + ["bool"]


def test_under_threads_seq_has_no_gap_and_positions_ascend_with_it(database: Database) -> None:
    def write(thread: int) -> None:
        for number in range(10):
            with database.write() as connection:
                _append_one(connection, f"e-{thread}-{number}", f"agg-{number % 2}")

    assert together(*[lambda thread=thread: write(thread) for thread in range(6)]) == [None] * 6
    for aggregate in ("agg-0", "agg-1"):
        found = rows(database, f"SELECT seq FROM outbox WHERE aggregate_id = '{aggregate}' ORDER BY position")
        assert found == [(seq,) for seq in range(1, 31)]


@pytest.mark.parametrize("late_for", ["read", "mark"])
def test_an_event_that_commits_late_with_a_lower_position_is_still_relayed(postgres: Database, late_for: str) -> None:
    with ExitStack() as late:
        slow = late.enter_context(postgres.write())
        _append_one(slow, "slow", "a")
        with postgres.write() as fast:
            _append_one(fast, "fast", "b")
        with postgres.read() as connection:
            read = pending_events(connection, 10)
        assert [event_id for _, event_id in read] == ["fast"]
        if late_for == "read":
            late.close()
        with postgres.write() as connection:
            mark_published(connection, [position for position, _ in read], 1)
    assert rows(postgres, "SELECT event_id FROM outbox ORDER BY position") == [("slow",), ("fast",)]
    assert _pending(postgres) == ["slow"]


def test_a_second_writer_of_an_aggregate_waits_for_the_first(postgres: Database) -> None:
    done = threading.Event()

    def second() -> None:
        append(postgres, "a", 2)
        done.set()

    with postgres.write() as connection:
        _append_one(connection, "a-1", "a")
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
        wait_until(lambda: rows(postgres, waiting)[0][0] == 1, 60, "the second writer waits")
        assert not done.is_set()
    thread.join(10)
    assert [row.event.event_id for row in _events(postgres, "a")] == ["a-1", "a-2"]


def _events(database: Database, aggregate: str) -> list[Any]:
    with database.read() as connection:
        return events_of(connection, aggregate)


def test_only_what_was_read_is_marked(database: Database) -> None:
    append(database, "a", 1, 2)
    with database.read() as connection:
        read = pending_events(connection, 10)
    append(database, "a", 3)
    for _ in range(2):  # marked twice is marked once
        with database.write() as connection:
            mark_published(connection, [position for position, _ in read], 7)
    assert _pending(database) == ["a-3"]
    assert rows(database, "SELECT published_at FROM outbox ORDER BY position") == [(7,), (7,), (None,)]


def test_pending_events_come_in_order_and_no_more_than_asked_for(database: Database) -> None:
    append(database, "a", *range(1, 6))
    assert _pending(database, 3) == ["a-1", "a-2", "a-3"]
    with database.write() as connection:
        mark_published(connection, [], 1)
    assert len(_pending(database)) == 5


def test_numbers_that_were_rolled_back_or_skipped_hold_nothing_up(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        _append_one(connection, "gone", "a") and 1 / 0
    append(database, "a", 1)
    with database.write() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO outbox (position, event_id, aggregate_id, seq, event_type, payload)"
                " VALUES (900, 'far', 'b', 1, 't', '{}')"
            )
        )
    assert _pending(database) == ["a-1", "far"]


def test_with_an_empty_list_what_was_pushed_long_ago_is_lost(database: Database) -> None:
    append(database, "a", 1, 2, 3)
    spread(database, "a-1")
    publish(database, now=100)
    assert _lost(database, before=100, head=None) == []  # not yet
    assert _lost(database, before=101, head=None) == ["a-2", "a-3"]  # never what was fanned out
    assert _lost(database, before=101, head=None, limit=1) == ["a-2"]
    append(database, "a", 4)
    assert _lost(database, before=10_000, head=None) == ["a-2", "a-3"]  # never what was not pushed


def test_a_slow_queue_is_never_taken_for_lost(database: Database) -> None:
    for number in (1, 2, 3):
        append(database, "a", number)
        publish(database, now=100 * number)
    assert _lost(database, before=10**6, head="a-1") == []
    assert _lost(database, before=10**6, head="a-2") == ["a-1"]
    assert _lost(database, before=10**6, head="a-3") == ["a-1", "a-2"]
    assert _lost(database, before=150, head="a-3") == ["a-1"]


def test_a_head_that_is_no_event_or_not_marked_yet_says_nothing(database: Database) -> None:
    append(database, "a", 1)
    publish(database, now=100)
    append(database, "a", 2)
    assert _lost(database, before=10**6, head="a-2") == []
    assert _lost(database, before=10**6, head="junk") == []
    assert _lost(database, before=10**6, head="") == []


def test_a_slow_queue_behind_an_event_that_was_published_again_is_not_lost(database: Database) -> None:
    """The head's entry is the old one, though its event was pushed once more since."""
    for number in (1, 2, 3):
        append(database, "a", number)
        publish(database, now=100 * number)
    with database.write() as connection:
        publish_again(connection, "a-1")
    assert publish(database, now=900) == ["a-1"]
    assert _lost(database, before=10**6, head="a-1") == []
    assert _lost(database, before=10**6, head=None) == ["a-2", "a-3", "a-1"]


def test_what_is_lost_goes_through_the_relay_again_unless_it_arrived_meanwhile(database: Database) -> None:
    append(database, "a", 1, 2, 3)
    publish(database, now=100)
    spread(database, "a-1")
    positions = [position for (position,) in rows(database, "SELECT position FROM outbox")]
    with database.write() as connection:
        assert reset_to_pending(connection, positions) == 2
        assert reset_to_pending(connection, positions) == 0
        assert reset_to_pending(connection, []) == 0
    assert publish(database, now=200) == ["a-2", "a-3"]
    assert _lost(database, before=200, head=None) == []  # the push renewed their age
    assert _lost(database, before=201, head=None) == ["a-2", "a-3"]


def test_publishing_again_makes_the_event_pending_and_not_fanned_out(database: Database) -> None:
    append(database, "a", 1)
    spread(database, *publish(database))
    for _ in range(2):
        with database.write() as connection:
            assert publish_again(connection, "a-1").event_id == "a-1"
    with database.read() as connection:
        row = find_event(connection, "a-1")
    assert (row.status, row.fanned_out_at) == ("PENDING", None)
    with pytest.raises(NotFound, match="no event a-9"), database.write() as connection:
        publish_again(connection, "a-9")


def test_an_event_is_found_by_its_id_or_its_orders(database: Database) -> None:
    place(database, 7)
    with database.read() as connection:
        assert find_event(connection, "order-7") == find_event(connection, "order-7:placed")
        with pytest.raises(NotFound, match="no event order-8"):
            find_event(connection, "order-8")
        assert events_of(connection, "order/order-8") == []

"""Redrives: the set is frozen once, each item is taken once whatever happens meanwhile, and order is kept."""

import random
from typing import Any

import pytest

from contracts.errors import Conflict, InvalidInput, NotFound, Refused
from store.dead_letters import DeadFilter, count_dead, waive
from store.deliveries import mark_done, next_batch, record_failure
from store.engine import Database
from store.receivers import lock_receiver
from store.redrives import (
    CANCELLED,
    COMPLETED,
    RUNNING,
    Chunk,
    Redrive,
    cancel_redrive,
    freeze_redrive,
    get_redrive,
    postpone_redrive_look,
    redrives_due,
    take_chunk,
)
from tests.store.processes import Script
from tests.store.scenes import append, batch, delivered_to, publish, register, rows, scalar, spread, together
from tests.store.test_dead_letters import kill


def freeze(
    database: Database, request: str = "r", filters: DeadFilter | None = None, now: int = 100
) -> tuple[Redrive, bool]:
    with database.write() as connection:
        return freeze_redrive(connection, request, filters or DeadFilter(), now, now + 5)


def take(database: Database, request: str = "r", limit: int = 100, now: int = 200) -> Chunk:
    with database.write() as connection:
        return take_chunk(connection, request, limit, now)


def counts(redrive: Redrive) -> tuple[str, int, int, int]:
    return redrive.state, redrive.total, redrive.taken, redrive.skipped


def deliver(database: Database, receiver: str, poison: set[str] = frozenset(), limit: int = 100) -> list[str]:  # type: ignore[assignment]
    """Takes all that may be taken, one by one as the batches give them; the poisonous ones die."""
    taken = []
    while True:
        with database.write() as connection:
            lock_receiver(connection, receiver)
            events = next_batch(connection, receiver, limit)
            closed = set()
            for event in events:
                if event.aggregate_id in closed:
                    continue
                taken.append(event.event_id)
                if event.event_id in poison:
                    closed.add(event.aggregate_id)
                    record_failure(
                        connection, receiver, event.position, attempts=5, error="poison", next_attempt_at=None, now=9
                    )
                else:
                    mark_done(connection, receiver, [event.position])
        if not events:
            return taken


def seed(database: Database, number: int, receiver: str = "one") -> None:
    """That many dead letters of as many aggregates, written as the pipeline would have left them."""
    register(database, receiver)
    with database.write() as connection:
        connection.exec_driver_sql(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {number})"
            " INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status, fanned_out_at)"
            " SELECT 'e-' || i, 'a-' || i, 1, 'thing-happened', '{}', 'PUBLISHED', 1 FROM n"
        )
        connection.exec_driver_sql(
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status, attempts, last_error, settled_at)"
            f" SELECT '{receiver}', position, aggregate_id, seq, 'dead', 5, 'ValueError: x', 3 FROM outbox"
        )


def test_dead_letters_become_pending_again_with_attempts_from_zero(database: Database) -> None:
    delivered_to(database, "one", "two")
    kill(database, "one", "a-1")
    kill(database, "two", "a-1")
    redrive, made = freeze(database)
    assert (made, counts(redrive), redrive.filters, redrive.left) == (True, (RUNNING, 2, 0, 0), {}, 2)
    assert batch(database, "one") == []  # asked for is not taken
    chunk = take(database)
    assert (chunk.items, chunk.receivers, counts(chunk.redrive)) == (2, ("one", "two"), (COMPLETED, 2, 2, 0))
    assert chunk.redrive.ended_at == 200
    assert batch(database, "one") == ["a-1", "a-2", "a-3"]
    assert rows(
        database,
        "SELECT DISTINCT attempts, next_attempt_at, last_error, has_run, settled_at FROM deliveries WHERE position = 1",
    ) == [(0, None, "ValueError: it broke", 0, None)]


def test_the_set_is_fixed_when_it_is_asked_for(database: Database) -> None:
    delivered_to(database, "one", aggregate="a")
    events = append(database, "b", 1)
    spread(database, *publish(database))
    kill(database, "one", "a-1")
    freeze(database)
    kill(database, "one", events[0].event_id)
    assert counts(take(database).redrive) == (COMPLETED, 1, 1, 0)
    assert scalar(database, "SELECT count(*) FROM deliveries WHERE status = 'dead'") == 1


def test_only_what_the_filters_let_through_is_taken(database: Database) -> None:
    delivered_to(database, "one", "two", count=1)
    append(database, "b", 1)
    spread(database, *publish(database))
    for receiver in ("one", "two"):
        kill(database, receiver, "a-1", error="ValueError: x", now=10)
        kill(database, receiver, "b-1", error="KeyError: y", now=20)
    for name, filters, expected in (
        ("1", DeadFilter(receiver="one", error="Key"), 1),
        ("2", DeadFilter(event="a-1"), 2),
        ("3", DeadFilter(since=20), 1),
        ("4", DeadFilter(aggregate="a"), 0),
        ("5", DeadFilter(), 0),
    ):
        assert freeze(database, name, filters)[0].total == expected
        take(database, name)
    with database.read() as connection:
        assert count_dead(connection, DeadFilter()) == 0
        assert get_redrive(connection, "1").filters == {"receiver": "one", "error": "Key"}


def test_the_same_request_does_its_work_once(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    assert freeze(database, now=100)[1] is True
    again, made = freeze(database, now=150)
    assert (made, again.created_at, again.total) == (False, 100, 1)
    take(database)
    deliver(database, "one", poison={"a-1"})
    third, made = freeze(database, now=300)
    assert (made, counts(third)) == (False, (COMPLETED, 1, 1, 0))
    assert take(database).items == 0
    assert batch(database, "one") == []  # a-1 died again, and is not taken twice


def test_the_same_request_with_other_filters_is_a_conflict(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    freeze(database, filters=DeadFilter(receiver="one", since=20, since_said="2h"))
    # Two hours before now is another instant now, and the same request.
    assert freeze(database, filters=DeadFilter(receiver="one", since=40, since_said="2h"))[1] is False
    for other in (DeadFilter(), DeadFilter(receiver="one"), DeadFilter(receiver="one", since=20)):
        with pytest.raises(Conflict, match=r"redrive r was asked for at .* with --receiver one --since 2h; nothing"):
            freeze(database, filters=other)


def test_two_that_ask_for_the_same_request_at_once_make_one(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    answers = together(*[lambda: freeze(database)] * 4)
    assert sorted(made for _, made in answers) == [False, False, False, True]
    assert {redrive.total for redrive, _ in answers} == {1}
    assert scalar(database, "SELECT count(*) FROM redrive_items") == 1


def test_an_empty_set_is_complete_at_once_and_has_no_run_to_look_for(database: Database) -> None:
    delivered_to(database, "one")
    redrive, _ = freeze(database)
    assert (counts(redrive), redrive.ended_at) == ((COMPLETED, 0, 0, 0), 100)
    with database.read() as connection:
        assert redrives_due(connection, 10**12, 10) == []


def test_unknown_names_and_unusable_ids_freeze_nothing(database: Database) -> None:
    delivered_to(database, "one")
    with pytest.raises(InvalidInput, match="request"):
        freeze(database, "")
    with pytest.raises(NotFound, match="receiver nobody"):
        freeze(database, filters=DeadFilter(receiver="nobody"))
    with pytest.raises(NotFound, match="event a-9"):
        freeze(database, filters=DeadFilter(event="a-9"))
    with pytest.raises(NotFound, match="no redrive r"):
        take(database)
    assert scalar(database, "SELECT count(*) FROM redrives") == 0


def test_a_waived_event_is_refused_with_its_reason_when_it_is_named_and_left_out_of_a_bulk(database: Database) -> None:
    delivered_to(database, "one", "two")
    for receiver in ("one", "two"):
        kill(database, receiver, "a-1")
    with database.write() as connection:
        waive(connection, "one", "a-1", "sold out", "ann", 60)
    with pytest.raises(Refused, match=r"a-1 was waived at one by ann at .*: sold out; a waived event is not redriven"):
        freeze(database, filters=DeadFilter(receiver="one", event="a-1"))
    assert scalar(database, "SELECT count(*) FROM redrives") == 0
    assert freeze(database, "b", DeadFilter(event="a-1"))[0].total == 1  # it is dead at two
    take(database, "b")
    with pytest.raises(Refused):
        freeze(database, filters=DeadFilter(event="a-1"))


def test_what_is_waived_or_taken_by_another_redrive_meanwhile_is_skipped_and_counted(database: Database) -> None:
    delivered_to(database, "one", count=1)
    append(database, "b", 1)
    append(database, "c", 1)
    spread(database, *publish(database))
    kill(database, "one", "a-1", "b-1", "c-1")
    freeze(database)
    freeze(database, "other", DeadFilter(event="b-1"))
    take(database, "other")
    with database.write() as connection:
        waive(connection, "one", "a-1", "sold out", "ann", 60)
    assert counts(take(database).redrive) == (COMPLETED, 3, 1, 2)
    assert rows(database, "SELECT skipped FROM redrive_items WHERE request_id = 'r' ORDER BY position") == [
        (1,),
        (1,),
        (0,),
    ]
    assert scalar(database, "SELECT status FROM deliveries WHERE position = 1") == "waived"


def test_an_item_that_dies_again_while_the_redrive_runs_is_taken_once(database: Database) -> None:
    delivered_to(database, "one", count=1)
    append(database, "b", 1)
    spread(database, *publish(database))
    kill(database, "one", "a-1", "b-1")
    freeze(database)
    assert take(database, limit=1).redrive.state == RUNNING
    assert deliver(database, "one", poison={"a-1"}) == ["a-1"]
    assert counts(take(database, limit=1).redrive) == (COMPLETED, 2, 2, 0)
    assert deliver(database, "one", poison={"a-1"}) == ["b-1"]
    assert scalar(database, "SELECT last_error FROM deliveries WHERE status = 'dead'") == "poison"


def test_later_events_of_an_aggregate_wait_for_the_redriven_one(database: Database) -> None:
    delivered_to(database, "one", aggregate="a", count=4)
    append(database, "b", 1, 2)
    spread(database, *publish(database))
    kill(database, "one", "a-1", "b-1")
    freeze(database)
    chunk = take(database, limit=1)
    assert chunk.redrive.left == 1
    # Also one at a time, and also when the redriven one dies again: nothing passes it.
    assert deliver(database, "one", limit=1) == ["a-1", "a-2", "a-3", "a-4"]
    take(database)
    assert deliver(database, "one", poison={"b-1"}) == ["b-1"]
    assert batch(database, "one") == []


def test_a_poisonous_one_in_a_bulk_stops_nobody(database: Database) -> None:
    delivered_to(database, "one", count=1)
    for name in "bcd":
        append(database, name, 1, 2)
    spread(database, *publish(database))
    kill(database, "one", "a-1", "b-1", "c-1", "d-1")
    freeze(database)
    while take(database, limit=2).redrive.state == RUNNING:
        deliver(database, "one", poison={"b-1"})
    deliver(database, "one", poison={"b-1"})
    assert rows(
        database,
        "SELECT event_id FROM outbox JOIN deliveries USING (position) WHERE deliveries.status <> 'done'"
        " ORDER BY position",
    ) == [("b-1",), ("b-2",)]


def test_cancelled_it_stays_where_it_is(database: Database) -> None:
    register(database, "one")
    for name in "abc":
        append(database, name, 1)
    spread(database, *publish(database))
    kill(database, "one", "a-1", "b-1", "c-1")
    freeze(database)
    take(database, limit=1)
    with database.write() as connection:
        redrive = cancel_redrive(connection, "r", "enough", 300)
    assert (counts(redrive), redrive.note, redrive.ended_at) == ((CANCELLED, 3, 1, 0), "enough", 300)
    assert take(database).items == 0
    assert batch(database, "one") == ["a-1"]
    with database.write() as connection:
        assert cancel_redrive(connection, "r", "again", 400).note == "enough"
    # What is left can be asked for by another request.
    assert freeze(database, "rest")[0].total == 2


def test_a_complete_one_cannot_be_cancelled(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    freeze(database)
    take(database)
    with database.write() as connection:
        assert counts(cancel_redrive(connection, "r", "late", 400)) == (COMPLETED, 1, 1, 0)


def test_the_look_finds_running_ones_when_they_are_due(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    freeze(database, filters=DeadFilter(receiver="one"), now=100)

    def due(now: int) -> list[Any]:
        with database.read() as connection:
            return [(each.request_id, each.filters.get("receiver")) for each in redrives_due(connection, now, 10)]

    assert due(104) == []
    assert due(105) == [("r", "one")]
    with database.write() as connection:
        postpone_redrive_look(connection, "r", 500)
    assert due(499) == []
    assert due(500) == [("r", "one")]
    take(database)
    assert due(10**12) == []


def test_chunks_at_once_and_deliveries_beside_them_take_each_item_once(database: Database) -> None:
    number = 300
    seed(database, number)
    freeze(database)
    taken: list[int] = []
    delivered: list[str] = []

    def chunks() -> None:
        while True:
            chunk = take(database, limit=random.choice([1, 7, 20]))
            taken.append(chunk.items)
            if chunk.redrive.state != RUNNING:
                return

    def deliveries() -> None:
        while len(delivered) < number:
            delivered.extend(deliver(database, "one", limit=30))

    def twin() -> None:
        with database.read() as connection:
            assert get_redrive(connection, "r").total == number
        chunks()

    assert together(chunks, twin, chunks, deliveries) == [None] * 4
    assert sum(taken) == number
    assert sorted(delivered) == sorted(f"e-{i}" for i in range(1, number + 1))
    with database.read() as connection:
        assert counts(get_redrive(connection, "r")) == (COMPLETED, number, number, 0)


_KILLED = """
import sys
from store.engine import Database
from store.redrives import take_chunk

database = Database(sys.argv[1])
while True:
    with database.write() as connection:
        chunk = take_chunk(connection, "r", 250, 7)
    # Committed, and whoever asked is not told: it waits to be killed.
    print(chunk.redrive.taken, flush=True)
    if chunk.redrive.taken >= 5000:
        sys.stdin.read()
"""


def test_10001_items_with_a_kill_between_commit_and_answer_at_the_middle(database: Database, database_url: str) -> None:
    seed(database, 10_001)
    assert freeze(database)[0].total == 10_001
    with Script(_KILLED, database_url) as worker:
        while worker.line() != "5000":
            pass
    with database.read() as connection:
        assert counts(get_redrive(connection, "r")) == (RUNNING, 10_001, 5000, 0)
    chunk = take(database, limit=2000)
    assert counts(chunk.redrive) == (RUNNING, 10_001, 7000, 0)
    while chunk.redrive.state == RUNNING:
        chunk = take(database, limit=2000)
    assert counts(chunk.redrive) == (COMPLETED, 10_001, 10_001, 0)
    assert scalar(database, "SELECT count(*) FROM deliveries WHERE status = 'pending' AND attempts = 0") == 10_001
    assert rows(database, "SELECT taken_at, count(*) FROM redrive_items GROUP BY taken_at ORDER BY 1") == [
        (7, 5000),
        (200, 5001),
    ]

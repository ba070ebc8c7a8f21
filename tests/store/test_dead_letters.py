"""Dead letters: filters that mean the same everywhere, totals, and letting one go for good."""

from typing import Any

import pytest

from contracts.errors import Conflict, InvalidInput, NotFound, Refused
from store.dead_letters import (
    MAX_REASON,
    DeadFilter,
    Waiver,
    count_dead,
    dead_letters,
    find_event,
    matching,
    resolve,
    totals_by_error,
    totals_by_receiver,
    waive,
)
from store.deliveries import mark_done, record_failure
from store.engine import Database
from store.outbox import append_event
from store.schema import deliveries
from tests.store.scenes import append, batch, delivered_to, publish, register, rows, scalar, spread, together


def kill(
    database: Database, receiver: str, *event_ids: str, error: str = "ValueError: it broke", now: int = 50
) -> None:
    """Makes dead letters of these."""
    with database.write() as connection:
        for event_id in event_ids:
            position = scalar(database, f"SELECT position FROM outbox WHERE event_id = '{event_id}'")
            record_failure(connection, receiver, position, attempts=5, error=error, next_attempt_at=None, now=now)


def _listed(database: Database, filters: DeadFilter, **options: Any) -> list[tuple[str, str]]:
    with database.read() as connection:
        resolved = resolve(connection, filters)
        letters = dead_letters(connection, resolved, **options)
        count = count_dead(connection, resolved, status=options.get("status", "dead"))
    if "limit" not in options:
        assert len(letters) == count
    return [(letter.receiver, letter.event_id) for letter in letters]


def _waive(
    database: Database, receiver: str, event: str, reason: str = "sold out", by: str = "ann", now: int = 60
) -> Waiver:
    with database.write() as connection:
        return waive(connection, receiver, event, reason, by, now)


@pytest.fixture
def four(database: Database) -> Database:
    """Two dead at each of `one` and `two`, with an event waiting behind a-1."""
    register(database, "one", "two")
    append(database, "a", 1, 2)
    append(database, "b", 1)
    append(database, "c", 1)
    spread(database, *publish(database))
    kill(database, "one", "a-1", now=10)
    kill(database, "one", "c-1", error="KeyError: 'amount' of c-1", now=20)
    kill(database, "two", "b-1", error="ValueError: no customer 100%", now=30)
    kill(database, "two", "c-1", error="TimeOut", now=40)
    return database


ALL = [("one", "a-1"), ("one", "c-1"), ("two", "b-1"), ("two", "c-1")]


FILTERS = [
    (DeadFilter(), ALL),
    (DeadFilter(receiver="one"), ALL[:2]),
    (DeadFilter(event="c-1"), [ALL[1], ALL[3]]),
    (DeadFilter(aggregate="a"), ALL[:1]),
    (DeadFilter(aggregate="nobody"), []),
    (DeadFilter(error="ValueError"), [ALL[0], ALL[2]]),
    (DeadFilter(error="valueerror"), []),  # case counts, on both databases
    (DeadFilter(error="100%"), [ALL[2]]),  # no wildcards
    (DeadFilter(error="_"), []),
    (DeadFilter(since=20), ALL[1:]),
    (DeadFilter(since=41), []),
    (DeadFilter(receiver="two", event="c-1", aggregate="c", error="Time", since=40), [ALL[3]]),
]


def test_filters_narrow_one_by_one_and_together(four: Database) -> None:
    for filters, expected in FILTERS:
        assert _listed(four, filters) == expected, filters


def test_a_receiver_or_an_event_that_there_is_not_is_said_so(four: Database) -> None:
    with pytest.raises(NotFound, match="there is no receiver three; there are one, two"):
        _listed(four, DeadFilter(receiver="three"))
    with pytest.raises(NotFound, match="there is no event a-9"):
        _listed(four, DeadFilter(event="a-9"))


def test_an_order_id_names_its_order_placed_and_an_events_own_id_comes_first(database: Database) -> None:
    append(database, "x", 1)
    append(database, "x-1:placed", 1)  # event x-1:placed-1
    with database.read() as connection:
        assert find_event(connection, "x-1") == "x-1"
        with pytest.raises(NotFound):
            find_event(connection, "x-2")
    with database.write() as connection:
        append_event(connection, event_id="x-2:placed", aggregate_id="order/x-2", event_type="t", payload={})
        append_event(connection, event_id="x-1:placed", aggregate_id="order/x-1", event_type="t", payload={})
    with database.read() as connection:
        assert find_event(connection, "x-2") == "x-2:placed"
        assert find_event(connection, "x-1") == "x-1"


def test_totals_name_each_receiver_and_each_kind_of_error(four: Database) -> None:
    with four.read() as connection:
        receivers = totals_by_receiver(connection, DeadFilter())
        errors = totals_by_error(connection, DeadFilter())
        assert [(t.receiver, t.count, t.oldest, t.newest) for t in receivers] == [
            ("one", 2, 10, 20),
            ("two", 2, 30, 40),
        ]
        assert [(t.receiver, t.kind, t.count, t.example) for t in errors] == [
            ("one", "KeyError", 1, "KeyError: 'amount' of c-1"),
            ("one", "ValueError", 1, "ValueError: it broke"),
            ("two", "TimeOut", 1, "TimeOut"),
            ("two", "ValueError", 1, "ValueError: no customer 100%"),
        ]
        assert len(totals_by_error(connection, DeadFilter(), limit=3)) == 3
        assert totals_by_receiver(connection, DeadFilter(error="none of them")) == []


def test_a_page_is_bounded_and_says_what_waits_behind_each(four: Database) -> None:
    assert _listed(four, DeadFilter(), limit=3) == ALL[:3]
    with four.read() as connection:
        first, second = dead_letters(connection, DeadFilter(receiver="one"))
    assert (first.waiting, first.attempts, first.seq, first.aggregate_id, first.settled_at) == (1, 5, 1, "a", 10)
    assert second.waiting == 0


@pytest.mark.parametrize("filters", [DeadFilter(), DeadFilter(receiver="one"), DeadFilter(since=3)])
def test_the_list_reads_the_dead_and_not_all_deliveries(sqlite: Database, filters: DeadFilter) -> None:
    with sqlite.read() as connection:
        statement = matching(connection, filters, deliveries.c.position).order_by(
            deliveries.c.receiver, deliveries.c.position
        )
        text = str(statement.compile(connection, compile_kwargs={"literal_binds": True}))
        plan = " ".join(str(row) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))
    assert "deliveries_set_aside" in plan
    assert "TEMP B-TREE" not in plan


def test_a_waiver_lets_the_later_events_go_on_and_stays_on_record(database: Database) -> None:
    delivered_to(database, "one", "two")
    kill(database, "one", "a-1")
    assert batch(database, "one") == []
    waiver = _waive(database, "one", "a-1", "  sold\n out ")
    assert waiver == Waiver("one", "a-1", "a", "sold out", "ann", 60, created=True)
    assert batch(database, "one") == ["a-2", "a-3"]
    assert batch(database, "two") == ["a-1", "a-2", "a-3"]
    assert _listed(database, DeadFilter()) == []
    assert _listed(database, DeadFilter(), status="waived") == [("one", "a-1")]
    assert waiver.sentence() == "a-1 was waived at one by ann at 1970-01-01T00:00:00.060Z: sold out"


def test_waived_again_it_is_answered_as_the_first_time_and_for_another_reason_refused(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    first = _waive(database, "one", "a-1")
    again = _waive(database, "one", "a-1", by="bob", now=99)
    assert (again.by, again.at, again.reason, again.created) == ("ann", 60, first.reason, False)
    with pytest.raises(Conflict, match=r"was waived at one by ann at .*: sold out; nothing was changed"):
        _waive(database, "one", "a-1", "another one")


def test_two_waive_at_once_and_one_of_them_does_it(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    both = together(*[lambda by=by: _waive(database, "one", "a-1", by=by) for by in ("ann", "bob", "cat")])
    assert sorted(each.created for each in both) == [False, False, True]
    assert len({each.by for each in both}) == 1


def test_only_a_dead_letter_can_be_waived(database: Database) -> None:
    events = delivered_to(database, "one")
    with pytest.raises(Refused, match="a-1 cannot be waived at one: it has not failed"):
        _waive(database, "one", "a-1")
    with database.write() as connection:
        record_failure(connection, "one", events[0].position, attempts=1, error="x", next_attempt_at=70, now=50)
    with pytest.raises(Refused, match="still being retried"):
        _waive(database, "one", "a-1")
    with database.write() as connection:
        mark_done(connection, "one", [events[0].position])
    with pytest.raises(Refused, match="it was delivered"):
        _waive(database, "one", "a-1")
    with pytest.raises(NotFound):
        _waive(database, "nobody", "a-1")
    with pytest.raises(NotFound):
        _waive(database, "one", "a-77")
    assert rows(database, "SELECT reason, settled_by FROM deliveries WHERE reason IS NOT NULL") == []


def test_a_reason_must_say_something(database: Database) -> None:
    delivered_to(database, "one")
    kill(database, "one", "a-1")
    for reason in ("", "  \n", "x" * (MAX_REASON + 1), "a\0b", "\udcff"):
        with pytest.raises(InvalidInput, match="reason"):
            _waive(database, "one", "a-1", reason)
    assert _listed(database, DeadFilter()) == [("one", "a-1")]

"""Fan-out: one delivery a receiver, no gap within an aggregate, and nothing in the list can stop it."""

import random
from collections.abc import Sequence

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import fanout
from store.engine import Database
from store.fanout import FannedOut, fan_out
from store.outbox import publish_again
from store.receivers import register_receiver, registered_receivers
from store.status import count_invalid, outbox_status
from tests.store.scenes import append, delivered_to, place, publish, register, rows, scalar, spread, together

DELIVERED = (
    "SELECT receiver, event_id FROM deliveries JOIN outbox ON outbox.position = deliveries.position"
    " ORDER BY receiver, outbox.position"
)


def _fan_out(database: Database, *entries: bytes) -> FannedOut:
    with database.write() as connection:
        return fan_out(connection, entries, 5)


def test_each_receiver_that_takes_the_type_gets_one_delivery(database: Database) -> None:
    register(database, "one", "two")
    register(database, "three", event_type="other")
    append(database, "a", 1)
    append(database, "a", 2, event_type="other")
    append(database, "a", 3, event_type="nobody-takes-it")
    done = spread(database, "a-1", "a-2", "a-3")
    assert (done, done.deliveries) == (FannedOut(events=3, duplicates=0, invalid=0), 3)
    assert spread(database, "a-1", "a-2", "a-3").deliveries == 0
    assert rows(database, DELIVERED) == [("one", "a-1"), ("three", "a-2"), ("two", "a-1")]
    with database.read() as connection:
        assert outbox_status(connection).fanned_out == 0  # not published yet: it still counts as pending
    assert scalar(database, "SELECT count(*) FROM outbox WHERE fanned_out_at = 2") == 3


def test_called_twice_and_with_repeats_it_registers_once(database: Database) -> None:
    register(database, "one")
    append(database, "a", 1, 2)
    assert _fan_out(database, b"a-1", b"a-2", b"a-1") == FannedOut(events=2, duplicates=1, invalid=0)
    assert _fan_out(database, b"a-1", b"a-2") == FannedOut(events=0, duplicates=2, invalid=0)
    assert rows(database, DELIVERED) == [("one", "a-1"), ("one", "a-2")]


def test_an_entry_out_of_order_brings_the_earlier_events_of_its_aggregate_with_it(database: Database) -> None:
    register(database, "one")
    append(database, "a", *range(1, 6))
    append(database, "b", 1, 2)
    assert _fan_out(database, b"a-4").events == 4
    assert [event for _, event in rows(database, DELIVERED)] == ["a-1", "a-2", "a-3", "a-4"]
    assert _fan_out(database, b"a-2", b"a-5", b"b-2") == FannedOut(events=3, duplicates=1, invalid=0)
    assert [event for _, event in rows(database, DELIVERED)] == [f"a-{n}" for n in range(1, 6)] + ["b-1", "b-2"]


def test_earlier_events_are_looked_for_only_where_the_batch_lacks_some(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two events of a job come together, and a question for each job kept the writer longer than all the rest."""
    register(sqlite, "one")
    for aggregate in "abc":
        append(sqlite, aggregate, 1, 2, 3)
    asked: list[object] = []

    def rows_of(connection: sa.Connection, *parameters: object) -> Sequence[Sequence[object]]:
        asked.append(parameters[0])
        return earlier(connection, *parameters)

    earlier = fanout._EARLIER.rows
    monkeypatch.setattr(fanout._EARLIER, "rows", rows_of)
    assert _fan_out(sqlite, b"a-2", b"a-1", b"b-2", b"b-3", b"c-1").events == 6
    assert asked == ["b"]
    assert [event for _, event in rows(sqlite, DELIVERED)] == ["a-1", "a-2", "b-1", "b-2", "b-3", "c-1"]


def test_a_delivery_that_is_there_keeps_its_state(database: Database) -> None:
    delivered_to(database, "one", count=2)
    with database.write() as connection:
        connection.execute(
            sa.text("UPDATE deliveries SET status = 'dead', attempts = 5, last_error = 'x' WHERE seq = 1")
        )
        connection.execute(sa.text("UPDATE deliveries SET status = 'done' WHERE seq = 2"))
        publish_again(connection, "a-1")
        publish_again(connection, "a-2")
    before = rows(database, "SELECT * FROM deliveries ORDER BY position")
    spread(database, *publish(database))
    assert rows(database, "SELECT * FROM deliveries ORDER BY position") == before


def test_publishing_again_adds_the_deliveries_that_are_missing(database: Database) -> None:
    delivered_to(database, "one", "two", count=1)
    with database.write() as connection:
        connection.execute(sa.text("DELETE FROM deliveries WHERE receiver = 'two'"))
        publish_again(connection, "a-1")
    spread(database, *publish(database))
    assert rows(database, DELIVERED) == [("one", "a-1"), ("two", "a-1")]


def test_a_receiver_begins_with_the_events_after_it_was_registered(database: Database) -> None:
    append(database, "a", 1)
    register(database, "late")
    register(database, "late")  # again: changes nothing
    append(database, "a", 2)
    register(database, "late")
    spread(database, "a-1", "a-2")
    assert rows(database, DELIVERED) == [("late", "a-2")]
    register(database, "late", event_type="other")  # a type that is new to it begins now
    assert len(rows(database, "SELECT 1 FROM subscriptions")) == 2
    with database.read() as connection:
        assert registered_receivers(connection) == ["late"]


def test_two_threads_that_register_one_receiver_make_one(database: Database) -> None:
    def call() -> None:
        with database.write() as connection:
            register_receiver(connection, "one", ["x", "y"])

    assert together(*[call] * 4) == [None] * 4
    assert rows(database, "SELECT receiver, event_type FROM subscriptions ORDER BY 2") == [("one", "x"), ("one", "y")]


JUNK = {
    "no event": b"order-404:placed",
    "empty": b"",
    "not UTF-8": b"\xff\xfe-1",
    "not UTF-8 with a NUL": b"\xff\x00-1",
    "a NUL": b"order\x00-1",
    "a surrogate": b"\xed\xa0\x80",
    "very long": b"x" * 100_000,
    "very long and wide": "".join(chr(0x10000 + 7919 * n % 60_000) for n in range(5000)).encode(),
    "very long and not UTF-8": bytes(range(128, 256)) * 100,
    "JSON": b'{"event_id": "a-1"}',
    "quotes": b"'\"\\%_",
}


@pytest.mark.parametrize("entry", JUNK.values(), ids=JUNK)
def test_an_entry_that_is_no_event_is_noted_and_the_rest_flows(database: Database, entry: bytes) -> None:
    register(database, "one")
    append(database, "a", 1)
    for _ in range(2):
        assert _fan_out(database, entry, b"a-1", entry).invalid == 1
    assert rows(database, DELIVERED) == [("one", "a-1")]
    with database.read() as connection:
        assert count_invalid(connection) == 1
    assert all(rows(database, "SELECT reason FROM invalid_entries")[0])


def test_any_bytes_at_all_are_taken(database: Database) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.binary(max_size=30) | st.text(max_size=300).map(lambda t: t.encode(errors="ignore")), max_size=5)
    )
    def take(entries: list[bytes]) -> None:
        result = _fan_out(database, *entries)
        assert result.events == 0
        assert result.invalid <= len(entries)
        assert result.duplicates + result.invalid == len(entries)

    take()


def test_an_empty_batch_is_nothing(database: Database) -> None:
    assert _fan_out(database) == FannedOut(0, 0, 0)


def test_events_that_nobody_takes_are_fanned_out_to_nobody(database: Database) -> None:
    place(database, 1)
    assert _fan_out(database, b"order-1:placed").events == 1
    assert rows(database, DELIVERED) == []


def test_two_fan_outs_at_once_register_each_delivery_once(database: Database) -> None:
    register(database, "one", "two")
    names = [f"{aggregate}-{number}" for aggregate in "abcd" for number in range(1, 26)]
    for aggregate in "abcd":
        append(database, aggregate, *range(1, 26))

    def run(ids: list[str]) -> None:
        for start in range(0, len(ids), 20):
            _fan_out(database, *[name.encode() for name in ids[start : start + 20]])

    mixed = random.Random(1).sample(names, len(names))
    assert together(lambda: run(names), lambda: run(names[::-1]), lambda: run(mixed)) == [None] * 3
    assert len(rows(database, DELIVERED)) == 200
    assert scalar(database, "SELECT count(*) FROM outbox WHERE fanned_out_at IS NULL") == 0

"""A receiver's drain: one bad event harms no neighbour, and what is not its fault does not count against it."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from temporalio.exceptions import ApplicationError

from activities.delivering import DeliveryActivities
from contracts.errors import SaiseiError, StoreBusy
from contracts.events import Event
from contracts.messages import DeliveryResult
from pipeline.retries import MOST_OPEN_RUNS
from receivers.base import Receiver, ReceiverUnavailable, RejectEvent
from store.engine import Database
from tests.activities.stages import Recorder, Stages, stages
from tests.store.scenes import append, rows
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def small(sqlite: Database, redis_url: str, receiver: Recorder) -> Iterator[Stages]:
    """On SQLite alone, where the database makes no difference."""
    with stages(sqlite, redis_url, receiver, backoff=0.001) as scene:
        yield scene


def attempts(scene: Stages, receiver: Receiver) -> DeliveryActivities:
    async def settled(name: str) -> None:
        await scene.retries.start_due(name)

    return DeliveryActivities(scene.writer, {receiver.name: receiver}, scene.hub, retry=scene.retry, settled=settled)


async def run_all(scene: Stages, receiver: Receiver) -> dict[str, DeliveryResult]:
    """What DeliveryWorkflow does for every event that failed, once it is due, retries included."""
    own, results = attempts(scene, receiver), {}
    while scene.counts(receiver.name)["retrying"]:
        await scene.retries.start_due(receiver.name)
        while scene.started:
            run = scene.started.pop(0)
            while run.event_id not in results:
                try:
                    results[run.event_id] = await own.attempt_delivery(run)
                except ApplicationError:
                    continue
    return results


async def test_a_bad_event_harms_no_neighbour_and_keeps_its_aggregate_in_order(
    scene: Stages, receiver: Recorder
) -> None:
    for aggregate in "abc":
        append(scene.database, aggregate, 1, 2, 3)
    receiver.errors = {"b-2": ValueError("no such sku")}
    await scene.drain()
    assert {event: state for event, state in scene.states().items() if state != "done"} == {
        "b-2": "retrying",
        "b-3": "pending",
    }
    assert scene.effects() == ["a-1", "a-2", "a-3", "b-1", "c-1", "c-2", "c-3"]
    results = await run_all(scene, receiver)
    assert results == {"b-2": DeliveryResult("dead", 5, "ValueError: no such sku")}
    assert rows(scene.database, "SELECT attempts, last_error FROM deliveries WHERE status = 'dead'") == [
        (5, "ValueError: no such sku")
    ]
    assert receiver.calls.count("b-2") == 6  # once in a batch, which is no attempt
    await scene.drain()
    assert scene.states()["b-3"] == "pending"  # it waits behind the dead one
    assert "b-2" not in scene.effects()


class Counting(Recorder):
    """Fails for `bad`: while it goes through the events one by one, or (`bulk`) when it has written for all of them."""

    def __init__(self, bad: str, *, bulk: bool = False, looks_at_first: bool = False) -> None:
        super().__init__()
        self.batches: list[int] = []
        self._bad = bad
        self._bulk = bulk
        self._looks_at_first = looks_at_first
        if not bulk:
            self.errors = {bad: ValueError("no such sku")}

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        self.batches.append(len(events))
        super().deliver_batch(connection, list(events) if self._bulk else events)
        if self._looks_at_first:
            next(iter(events))
        if self._bulk and self._bad in [event.event_id for event in events[:]]:
            raise ValueError("no such sku")


@pytest.mark.parametrize(
    ("receiver", "most"),
    [
        (Counting("a137-1"), 4),  # all, those before it, it alone, those behind it
        (Counting("a137-1", bulk=True), 19),
        (Counting("a137-1", bulk=True, looks_at_first=True), 21),  # where it stopped misleads
    ],
    ids=["one by one", "in bulk", "in bulk after a look"],
)
async def test_a_bad_event_among_many_is_found_in_few_attempts(
    sqlite: Database, redis_url: str, receiver: Counting, most: int
) -> None:
    with stages(sqlite, redis_url, receiver) as scene:
        for number in range(300):
            append(sqlite, f"a{number}", 1)
        await scene.drain()
        assert scene.counts() == {"done": 299, "retrying": 1}
        assert scene.states()["a137-1"] == "retrying"
        assert "a137-1" not in scene.effects()
        assert len(receiver.batches) <= most


async def test_after_a_failing_event_succeeds_the_ones_behind_it_follow(scene: Stages, receiver: Recorder) -> None:
    append(scene.database, "a", 1, 2, 3)
    receiver.errors = {"a-1": ValueError("not yet")}
    await scene.drain()
    assert scene.counts() == {"retrying": 1, "pending": 2}
    receiver.errors = {}
    assert (await run_all(scene, receiver))["a-1"].state == "done"
    await scene.drain()
    assert scene.counts() == {"done": 3}
    assert scene.effects() == ["a-1", "a-2", "a-3"]


async def test_a_rejected_event_is_dead_at_once_and_gets_no_run(small: Stages, receiver: Recorder) -> None:
    append(small.database, "a", 1, 2)
    append(small.database, "b", 1)
    receiver.errors = {"a-1": RejectEvent("unknown currency")}
    await small.drain()
    assert small.states() == {"a-1": "dead", "a-2": "pending", "b-1": "done"}
    assert await small.retries.start_due("recorder") == 0
    assert rows(small.database, "SELECT attempts, last_error FROM deliveries WHERE status = 'dead'") == [
        (1, "RejectEvent: unknown currency")
    ]


@pytest.mark.parametrize("error", [ReceiverUnavailable("down"), ConnectionRefusedError("no"), TimeoutError("slow")])
async def test_an_unavailable_receiver_holds_and_spends_nothing(
    small: Stages, receiver: Recorder, error: Exception
) -> None:
    append(small.database, "a", 1, 2)
    receiver.errors = {"a-1": error, "a-2": error}
    await small.drain()
    hold = small.receivers["recorder"].hold
    assert hold is not None
    assert hold.reason.startswith(type(error).__name__)
    assert small.counts() == {"pending": 2}
    assert small.scalar("SELECT sum(attempts) FROM deliveries") == 0
    receiver.errors = {}
    await small.drain()
    assert small.receivers["recorder"].hold is None
    assert small.effects() == ["a-1", "a-2"]


async def test_more_failing_events_than_runs_all_get_their_turn(small: Stages, receiver: Recorder) -> None:
    count = MOST_OPEN_RUNS * 2 + 5
    for number in range(count):
        append(small.database, f"a{number}", 1)
    receiver.errors = {f"a{number}-1": ValueError("bad") for number in range(count)}
    await small.drain()
    assert small.counts() == {"retrying": count}

    async def as_many_as_may_run() -> bool:
        await small.retries.start_due("recorder")
        return len(small.started) == MOST_OPEN_RUNS

    await eventually(as_many_as_may_run, 60, "they are due")
    own, open_runs, most = attempts(small, receiver), list(small.started), 0
    small.started.clear()
    settled = 0
    while open_runs:
        most = max(most, small.scalar("SELECT count(*) FROM deliveries WHERE has_run = 1 AND status = 'retrying'"))
        run = open_runs.pop(0)
        try:
            await own.attempt_delivery(run)
            settled += 1
        except ApplicationError:
            open_runs.append(run)
        open_runs += small.started
        small.started.clear()
    assert (settled, most) == (count, MOST_OPEN_RUNS)
    assert small.counts() == {"dead": count}


def _commit(connection: Connection) -> None:
    connection.commit()


def _rollback(connection: Connection) -> None:
    connection.rollback()


def _end(connection: Connection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    transaction.commit()


def _say(statement: str) -> Callable[[Connection], None]:
    return lambda connection: connection.exec_driver_sql(statement).close()


@pytest.mark.parametrize(
    "ending",
    [
        _commit,
        _rollback,
        _end,
        *map(_say, ("COMMIT", " end", "rollback", "ROLLBACK WORK", "/* so */ /* it * is */ COMMIT", "-- so\nCOMMIT")),
    ],
)
async def test_a_receiver_cannot_commit_and_then_raise(
    scene: Stages, receiver: Recorder, ending: Callable[[Connection], None]
) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)

    def after(connection: Connection) -> None:
        if receiver.calls[-1] == "b-1":
            ending(connection)

    receiver.after = after
    receiver.errors = {"b-1": ValueError("after the commit")}
    await scene.drain()
    assert scene.effects() == ["a-1"]
    assert scene.states() == {"a-1": "done", "b-1": "retrying"}
    assert (await run_all(scene, receiver))["b-1"].state == "dead"
    assert scene.effects() == ["a-1"]
    assert "must not end the transaction" in scene.scalar("SELECT last_error FROM deliveries WHERE status = 'dead'")


async def test_a_receiver_may_use_savepoints(small: Stages, receiver: Recorder) -> None:
    append(small.database, "a", 1)

    def after(connection: Connection) -> None:
        with connection.begin_nested() as savepoint:
            connection.execute(sa.text("DELETE FROM mail_messages"))
            savepoint.rollback()

    receiver.after = after
    await small.drain()
    assert small.effects() == ["a-1"]


async def test_a_wrong_statement_is_the_events_own_failure(scene: Stages, receiver: Recorder) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)

    def after(connection: Connection) -> None:
        if receiver.calls[-1] == "a-1":
            connection.execute(sa.text("INSERT INTO no_such_table VALUES (1)"))

    receiver.after = after
    await scene.drain()
    assert scene.states() == {"a-1": "retrying", "b-1": "done"}


async def test_a_locked_database_counts_against_nobody(
    sqlite_url: str, open_database: Callable[..., Database], redis_url: str, receiver: Recorder
) -> None:
    database = open_database(sqlite_url, busy_timeout=0.1)
    with stages(database, redis_url, receiver) as scene:
        append(database, "a", 1)
        await scene.drain(scene.relay, scene.fan_out)
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            await scene.drain()
        other.close()
        gate, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with Database(sqlite_url).write():
                gate.set()
                go_on.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        gate.wait(60)
        with pytest.raises(StoreBusy):
            await scene.drain()
        go_on.set()
        holder.join()
        assert rows(database, "SELECT status, attempts FROM deliveries") == [("pending", 0)]
        await scene.drain()
        assert scene.effects() == ["a-1"]


class Fat(Recorder):
    """Writes much for an event."""

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        super().deliver_batch(connection, events)
        for event in events:
            connection.execute(
                sa.text("UPDATE mail_messages SET order_id = :text WHERE position = :position"),
                {"text": "x" * 400_000, "position": event.position},
            )


async def test_a_full_disk_counts_against_nobody(sqlite: Database, redis_url: str) -> None:
    with stages(sqlite, redis_url, Fat()) as scene:
        append(sqlite, "a", 1, 2, 3, 4)
        await scene.drain(scene.relay, scene.fan_out)
        pages = int(scene.scalar("PRAGMA page_count"))

        def limit(most: int) -> None:
            with sqlite.write() as connection:  # the one that is written through, which the database keeps
                connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

        limit(pages + 20)
        with pytest.raises((DBAPIError, SaiseiError)):
            await scene.drain()
        assert scene.effects() == []
        assert rows(sqlite, "SELECT DISTINCT status, attempts FROM deliveries") == [("pending", 0)]
        limit(1_000_000)
        await scene.drain()
        assert scene.effects() == ["a-1", "a-2", "a-3", "a-4"]

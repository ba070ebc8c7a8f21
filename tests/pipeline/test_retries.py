"""Runs of failing events: none before its attempt is due, each once it is, and again where it was lost."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from contracts.messages import DeliveryInput
from pipeline.retries import MOST_OPEN_RUNS, Retries
from pipeline.writer import Writer
from store.deliveries import record_failure, retrying_of
from store.engine import Database
from tests.store.scenes import append, register, scalar, spread

pytestmark = pytest.mark.anyio

GRACE = 12


class Server:
    """Takes starts, or is away. `ms` is the clock of the worker beside it."""

    def __init__(self) -> None:
        self.ms = 0
        self.away = False
        self.started: list[str] = []

    async def start(self, message: DeliveryInput) -> None:
        if self.away:
            raise ConnectionRefusedError("Temporal is away")
        self.started.append(message.event_id)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr("pipeline.retries.now_ms", lambda: server.ms)
    monkeypatch.setattr("store.clock.now_ms", lambda: server.ms)
    monkeypatch.setattr("pipeline.retries._SHORTEST", 0.0)
    return server


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    register(database, "one")
    writer = Writer(database)
    yield writer
    writer.close()


def fail(database: Database, aggregate: str, due: int) -> None:
    [event] = append(database, aggregate, 1)
    spread(database, event.event_id)
    with database.write() as connection:
        record_failure(connection, "one", event.position, attempts=1, error="bad", next_attempt_at=due, now=1)


async def look(retries: Retries, database: Database) -> None:
    with database.read() as connection:
        found = {"one": retrying_of(connection, "one")}
    await retries.see(found)


async def test_a_run_is_started_when_its_attempt_is_due_and_no_look_is_needed_between(
    database: Database, writer: Writer, server: Server
) -> None:
    retries = Retries(writer, server.start, GRACE)
    assert retries.seconds() is None
    fail(database, "a", 1000)
    fail(database, "b", 1700)
    await look(retries, database)
    assert (server.started, retries.due(), retries.seconds()) == ([], [], 1.0)
    server.ms = 999
    assert retries.due() == []
    server.ms = 1000
    assert retries.due() == ["one"]
    assert await retries.start_due("one") == 1
    assert (server.started, retries.due(), retries.seconds()) == (["a-1"], [], 0.7)
    server.ms = 1700
    await look(retries, database)
    assert (server.started, retries.due(), retries.seconds()) == (["a-1", "b-1"], [], None)
    await look(retries, database)
    assert server.started == ["a-1", "b-1"]


async def test_a_look_that_finds_nothing_due_writes_nothing(
    sqlite: Database, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(sqlite, "one")
    fail(sqlite, "a", 1000)
    writer = Writer(sqlite)
    retries = Retries(writer, server.start, GRACE)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", None)
        await look(retries, sqlite)
    writer.close()


async def test_what_has_no_room_is_not_due_until_a_run_has_ended(
    database: Database, writer: Writer, server: Server
) -> None:
    for number in range(MOST_OPEN_RUNS + 1):
        fail(database, f"a{number}", 10 + number)
    retries = Retries(writer, server.start, GRACE)
    server.ms = 5000
    await look(retries, database)
    assert len(server.started) == MOST_OPEN_RUNS
    assert (retries.due(), retries.seconds()) == ([], None)  # or it would be asked for without a pause
    with database.write() as connection:
        connection.execute(sa.text("UPDATE deliveries SET status = 'dead', has_run = 0 WHERE aggregate_id = 'a0'"))
    assert await retries.start_due("one") == 1
    assert server.started[-1] == f"a{MOST_OPEN_RUNS}-1"


async def test_many_that_fall_due_one_by_one_are_claimed_together(
    database: Database, writer: Writer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.retries._SHORTEST", 60.0)
    for number in range(3):
        fail(database, f"a{number}", 1000 + number)
    retries = Retries(writer, server.start, GRACE)
    server.ms = 1000
    await look(retries, database)
    assert server.started == ["a0-1"]
    assert 1 < (retries.seconds() or 0) <= 60


@pytest.mark.parametrize("dies", ["Temporal", "the worker"])
async def test_what_was_claimed_and_not_started_is_started_once_it_is_overdue(
    database: Database, writer: Writer, server: Server, dies: str
) -> None:
    fail(database, "a", 1000)
    fail(database, "b", 1000)
    retries = Retries(writer, server.start, GRACE)
    await look(retries, database)
    server.ms, server.away = 1000, True
    with pytest.raises(ConnectionRefusedError):
        await retries.start_due("one")
    assert scalar(database, "SELECT sum(has_run) FROM deliveries") == 2
    assert (retries.due(), retries.seconds()) == ([], None)
    server.away = False
    if dies == "the worker":
        retries = Retries(writer, server.start, GRACE)
    server.ms = 1000 + GRACE * 1000
    await look(retries, database)
    assert server.started == []
    server.ms += 1
    await look(retries, database)
    assert server.started == ["a-1", "b-1"]


async def test_two_workers_start_each_run_once(database: Database, writer: Writer, server: Server) -> None:
    for number in range(5):
        fail(database, f"a{number}", 1000)
    workers = [Retries(writer, server.start, GRACE) for _ in range(2)]
    for retries in workers:
        await look(retries, database)
    server.ms = 1000
    assert [await retries.start_due("one") for retries in workers] == [5, 0]
    assert len(server.started) == 5

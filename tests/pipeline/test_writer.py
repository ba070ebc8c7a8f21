"""Pieces of work that wait at the same time share a transaction where there is one writer, and none harms another."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, event

from contracts.errors import StoreBusy, TransactionLost
from pipeline.writer import Writer
from store.engine import Database
from tests.store.scenes import rows
from tests.waiting import eventually

pytestmark = pytest.mark.anyio

Work = Callable[[Connection], object]


@pytest.fixture
def commits(database: Database) -> Iterator[list[int]]:
    """Grows by one with each commit."""
    seen: list[int] = []

    def count(connection: Connection) -> None:
        seen.append(1)

    with database.write() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS notes")
        connection.exec_driver_sql("CREATE TABLE notes (note TEXT PRIMARY KEY)")
    event.listen(database.engine, "commit", count)
    yield seen
    event.remove(database.engine, "commit", count)
    with database.write() as connection:
        connection.exec_driver_sql("DROP TABLE notes")


@pytest.fixture
async def writer(database: Database, commits: list[int]) -> AsyncIterator[Writer]:
    writer = Writer(database)
    yield writer
    writer.close()


# What only a shared transaction can do.
shared = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def note(text: str) -> Work:
    def write(connection: Connection) -> str:
        connection.execute(sa.text("INSERT INTO notes VALUES (:note)"), {"note": text})
        return text

    return write


def failing(text: str) -> Work:
    def write(connection: Connection) -> None:
        note(text)(connection)
        raise ValueError(text)

    return write


def notes(database: Database) -> list[str]:
    return [row[0] for row in rows(database, "SELECT note FROM notes ORDER BY note")]


async def at_once(database: Database, writer: Writer, *works: Work) -> list[object]:
    """What each came to; on SQLite all of them wait before the first one begins."""
    with database.write():
        tasks = [asyncio.create_task(writer.write(work)) for work in works]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_pieces_that_wait_together_share_a_commit_where_there_is_one_writer(
    database: Database, writer: Writer, commits: list[int]
) -> None:
    before = len(commits)
    if database.is_sqlite:
        writer._joinable = 60  # also on a machine that is busy
    assert await at_once(database, writer, *map(note, "abcde")) == list("abcde")
    own = len(commits) - before - 1  # the one that they waited for
    assert own == (1 if database.is_sqlite else 5)
    assert notes(database) == list("abcde")


async def test_on_postgresql_pieces_run_side_by_side(postgres: Database) -> None:
    writer, gate = Writer(postgres), threading.Barrier(4)
    try:
        await asyncio.gather(*(writer.write(lambda connection: gate.wait(60)) for _ in range(4)))
    finally:
        writer.close()


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
async def test_what_one_piece_raises_is_its_own(database: Database, writer: Writer, bad: int) -> None:
    works = [note("a"), note("b"), note("c"), note("d")]
    works[bad] = failing("bad")
    results = await at_once(database, writer, *works)
    expected: list[object] = list("abcd")
    assert isinstance(results[bad], ValueError)
    del results[bad], expected[bad]
    assert results == expected
    assert notes(database) == expected


async def test_pieces_that_all_fail_leave_nothing(database: Database, writer: Writer) -> None:
    results = await at_once(database, writer, *map(failing, "abc"))
    assert [str(error) for error in results] == ["a", "b", "c"]
    assert notes(database) == []
    assert await writer.write(note("after")) == "after"


async def test_a_piece_may_fail_by_a_statement_and_use_savepoints_of_its_own(
    database: Database, writer: Writer
) -> None:
    def careful(connection: Connection) -> str:
        savepoint = connection.begin_nested()
        note("dropped")(connection)
        savepoint.rollback()
        with connection.begin_nested():
            note("kept")(connection)
        return "careful"

    results = await at_once(database, writer, note("a"), note("a"), careful, note("b"))
    twice = results[:2]
    assert sorted(type(result).__name__ for result in twice) == ["IntegrityError", "str"]
    assert results[2:] == ["careful", "b"]
    assert notes(database) == ["a", "b", "kept"]


def lose(connection: Connection) -> None:
    """As SQLite does after a full disk."""
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.rollback()
    connection.exec_driver_sql("SELECT 1")


def replace(connection: Connection) -> None:
    """The worst that a receiver can do with the driver: another transaction in the place of ours."""
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("ROLLBACK").close()
    driver.execute("BEGIN IMMEDIATE").close()


@shared
@pytest.mark.parametrize("work", [lose, replace])
async def test_a_transaction_that_is_lost_is_lost_for_all_that_had_a_part_in_it(
    database: Database, writer: Writer, work: Work
) -> None:
    writer._joinable = 60
    results = await at_once(database, writer, note("a"), work, note("b"))
    assert isinstance(results[0], TransactionLost | sa.exc.OperationalError)
    assert results[1] is results[0]
    assert results[2] == "b"  # it had not begun
    assert notes(database) == ["b"]


@shared
async def test_a_commit_that_fails_fails_for_all(database: Database, writer: Writer) -> None:
    with database.write() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE children (note TEXT REFERENCES notes (note) DEFERRABLE INITIALLY DEFERRED)"
        )

    def orphan(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO children VALUES ('nobody')")

    writer._joinable = 60
    results = await at_once(database, writer, note("a"), orphan, note("b"))
    assert [type(error) for error in results] == [sa.exc.IntegrityError] * 3
    assert notes(database) == []
    with database.write() as connection:
        connection.exec_driver_sql("DROP TABLE children")


@shared
async def test_a_lock_that_cannot_be_had_is_told_to_all_who_wait(
    database_url: str, database: Database, commits: list[int], open_database: Callable[..., Database]
) -> None:
    hurried = open_database(database_url, busy_timeout=0.5)
    writer, tries = Writer(hurried), []
    write = hurried.write
    hurried.write = lambda: tries.append(1) or write()  # type: ignore[method-assign, func-returns-value]
    try:
        results = await at_once_while_held(database, writer, *map(note, "abcd"))
        assert [type(error) for error in results] == [StoreBusy] * 4
        assert len(tries) < 4  # not one after the other
        assert await writer.write(note("after")) == "after"
    finally:
        writer.close()


async def at_once_while_held(database: Database, writer: Writer, *works: Work) -> list[object]:
    with database.write():
        return await asyncio.gather(*(writer.write(work) for work in works), return_exceptions=True)


async def test_a_piece_that_nobody_waits_for_any_more_is_dropped_or_ends_by_itself(
    database: Database, writer: Writer
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        note("begun")(connection)
        begun.set()
        go_on.wait(60)
        note("ended")(connection)

    running = asyncio.create_task(writer.write(slow))
    await eventually(begun.is_set, 60, "the piece runs")
    others = [asyncio.create_task(writer.write(note(text))) for text in "ab"]
    await asyncio.sleep(0)
    nobody_waits = [running, others[0]] if database.is_sqlite else [running]  # there it waits behind the slow one
    for each in nobody_waits:
        each.cancel()
    # Only then has the writer heard of it: a cancellation takes a turn of the event loop.
    await asyncio.wait(nobody_waits)
    assert all(each.cancelled() for each in nobody_waits)
    go_on.set()
    assert await others[1] == "b"
    await asyncio.gather(*others, return_exceptions=True)
    await eventually(lambda: "ended" in notes(database), 60, "the slow piece has ended")
    assert notes(database) == (["b", "begun", "ended"] if database.is_sqlite else ["a", "b", "begun", "ended"])


@shared
async def test_a_transaction_that_is_old_takes_nobody_along(
    database: Database, writer: Writer, commits: list[int]
) -> None:
    before = len(commits)

    def slow(connection: Connection) -> None:
        time.sleep(0.012)

    await at_once(database, writer, *[slow] * 20)
    own = len(commits) - before - 1
    # Two by two, since 24 ms is too old; a machine that is busy may stretch one of them over the 20 ms.
    assert 10 <= own <= 20


async def test_how_long_others_were_kept_from_writing_is_the_pieces_own_time(
    database: Database, writer: Writer
) -> None:
    async def timed(seconds: float) -> float:
        return (await writer.timed_write(lambda connection: time.sleep(seconds)))[1]

    with database.write():
        tasks = [asyncio.create_task(timed(seconds)) for seconds in (0.001, 0.2)]
        await asyncio.sleep(0)
    brief, long = await asyncio.gather(*tasks)
    assert long >= 0.2
    assert brief < long


async def test_a_closed_writer_has_ended_what_waited_and_takes_nothing_more(database: Database, writer: Writer) -> None:
    with database.write():
        tasks = [asyncio.create_task(writer.write(note(text))) for text in "abc"]
        await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]
    with pytest.raises(RuntimeError):
        await writer.write(note("d"))
    assert notes(database) == ["a", "b", "c"]


@shared
async def test_a_patient_piece_joins_the_transaction_of_the_next_that_comes(
    database: Database, writer: Writer, commits: list[int]
) -> None:
    writer._joinable = 60  # also on a machine that is busy
    before = len(commits)
    patient = asyncio.create_task(writer.write(note("a"), patience=60))
    await asyncio.sleep(0)
    assert not patient.done()
    assert await writer.write(note("b")) == "b"
    assert await patient == "a"
    assert len(commits) - before == 1


async def test_a_patient_piece_to_which_nobody_comes_goes_alone(database: Database, writer: Writer) -> None:
    assert await writer.write(note("a"), patience=0.01) == "a"
    assert notes(database) == ["a"]


async def test_where_no_transaction_is_shared_nobody_is_patient(postgres: Database) -> None:
    writer = Writer(postgres)
    try:
        async with asyncio.timeout(60):
            await writer.write(lambda connection: None, patience=3600)
    finally:
        writer.close()


@shared
async def test_a_patient_piece_that_nobody_waits_for_any_more_is_dropped(database: Database, writer: Writer) -> None:
    patient = asyncio.create_task(writer.write(note("a"), patience=60))
    await asyncio.sleep(0)
    patient.cancel()
    await asyncio.wait([patient])
    assert patient.cancelled()
    assert await writer.write(note("b")) == "b"
    assert notes(database) == ["b"]


@shared
async def test_a_writer_that_is_closed_meanwhile_takes_no_patient_piece(database: Database, writer: Writer) -> None:
    patient = asyncio.create_task(writer.write(note("a"), patience=0.05))
    await asyncio.sleep(0)
    writer.close()
    with pytest.raises(RuntimeError):
        await patient
    assert notes(database) == []

"""Receivers that misbehave in ways of their own: that is the event's failed attempt, or a hold, and stops nobody."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from store.engine import Database
from tests.activities.stages import Recorder, Stages, stages
from tests.activities.test_receiving import run_all
from tests.store.scenes import append

pytestmark = pytest.mark.anyio


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException) -> Callable[[Connection], None]:
    def strange(_: Connection) -> None:
        raise error

    return strange


def _end_the_savepoint(connection: Connection) -> None:
    transaction = connection.get_nested_transaction()
    assert transaction is not None
    transaction.commit()


def _write_beside(connection: Connection) -> None:
    with connection.engine.begin() as other:
        other.exec_driver_sql("DELETE FROM orders")


@pytest.mark.parametrize(
    "strange",
    [
        pytest.param(_raise(SystemExit(3)), id="sys.exit"),
        pytest.param(_raise(KeyboardInterrupt()), id="KeyboardInterrupt"),
        pytest.param(_raise(asyncio.CancelledError()), id="CancelledError"),
        pytest.param(_raise(GeneratorExit()), id="GeneratorExit"),
        pytest.param(_raise(Unspeakable()), id="no text"),
        pytest.param(_end_the_savepoint, id="ends our savepoint"),
    ],
)
async def test_what_is_no_ordinary_error_is_a_failed_attempt_all_the_same(
    scene: Stages, receiver: Recorder, strange: Callable[[Connection], None]
) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)
    append(scene.database, "c", 1)
    receiver.after = lambda connection: strange(connection) if receiver.calls[-1] == "b-1" else None
    await scene.drain()
    assert scene.states() == {"a-1": "done", "b-1": "retrying", "c-1": "done"}
    assert (await run_all(scene, receiver))["b-1"].state == "dead"
    assert scene.effects() == ["a-1", "c-1"]


async def test_a_receiver_that_writes_beside_its_connection_waits_for_nobody(
    sqlite: Database, redis_url: str, receiver: Recorder
) -> None:
    """It would wait for the lock that its own thread holds, and everybody with it."""
    with stages(sqlite, redis_url, receiver, backoff=0.001) as scene:
        append(sqlite, "a", 1)
        append(sqlite, "b", 1)
        receiver.after = lambda connection: _write_beside(connection) if receiver.calls[-1] == "a-1" else None
        await scene.drain()
        assert scene.states() == {"a-1": "retrying", "b-1": "done"}
        assert "through the connection that it is given" in scene.scalar(
            "SELECT last_error FROM deliveries WHERE status = 'retrying'"
        )


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _roll_back(connection: Connection) -> None:
    _driver(connection).rollback()


def _roll_back_and_raise(connection: Connection) -> None:
    _driver(connection).rollback()
    raise ValueError("and then this")


def _begin_another(connection: Connection) -> None:
    for word in ("ROLLBACK", "BEGIN IMMEDIATE" if connection.dialect.name == "sqlite" else "BEGIN"):
        _driver(connection).execute(word).close()


@pytest.mark.parametrize("end", [_roll_back, _roll_back_and_raise, _begin_another])
async def test_an_event_for_which_the_receiver_ends_the_transaction_by_the_driver_fails_by_itself_and_says_so(
    scene: Stages, receiver: Recorder, end: Callable[[Connection], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that is done in that transaction is kept, so its neighbours are taken again, each in its own."""
    for aggregate in "abcd":
        append(scene.database, aggregate, 1, 2)
    receiver.after = lambda connection: end(connection) if receiver.calls[-1] == "b-1" else None
    await scene.drain()
    assert scene.states() == {
        **{f"{aggregate}-{number}": "done" for aggregate in "acd" for number in (1, 2)},
        **{"b-1": "retrying", "b-2": "pending"},
    }
    reason = "TransactionEnded: receiver recorder ended the transaction that it was given"
    assert scene.scalar("SELECT last_error FROM deliveries WHERE status = 'retrying'").startswith(reason)
    assert "receiver recorder ended the transaction" in caplog.text
    assert (await run_all(scene, receiver))["b-1"].state == "dead"
    assert scene.scalar("SELECT last_error FROM deliveries WHERE status = 'dead'").startswith(reason)
    assert scene.scalar("SELECT attempts FROM deliveries WHERE status = 'dead'") == 5
    assert scene.effects() == ["a-1", "a-2", "c-1", "c-2", "d-1", "d-2"]
    # Back to batches.
    receiver.after = None
    append(scene.database, "e", 1, 2, 3)
    await scene.drain(scene.relay, scene.fan_out)
    assert await scene.receivers["recorder"].step() == 3


async def test_a_receiver_that_ends_every_transaction_says_so_of_each_event_and_stands_still_for_none(
    scene: Stages, receiver: Recorder
) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)
    receiver.after = _roll_back
    await scene.drain()
    assert scene.counts() == {"retrying": 2}
    assert {result.state for result in (await run_all(scene, receiver)).values()} == {"dead"}
    assert scene.effects() == []


def _no_server(_: Connection) -> None:
    with sa.create_engine("postgresql+psycopg://127.0.0.1:1/theirs").connect():
        pass


def _no_file(_: Connection) -> None:
    with sa.create_engine("sqlite:////no/such/folder/theirs.db").connect():
        pass


def _no_connection_left(_: Connection) -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.01)
    with engine.connect(), engine.connect():
        pass


@pytest.mark.parametrize("away", [_no_server, _no_file, _no_connection_left])
async def test_a_receiver_whose_own_database_is_away_is_put_on_hold(
    scene: Stages, receiver: Recorder, away: Callable[[Connection], None]
) -> None:
    append(scene.database, "a", 1, 2)
    receiver.after = away
    await scene.drain()
    assert scene.receivers["recorder"].hold is not None
    assert scene.counts() == {"pending": 2}
    assert scene.scalar("SELECT sum(attempts) FROM deliveries") == 0
    receiver.after = None
    await scene.drain()
    assert scene.effects() == ["a-1", "a-2"]


async def test_one_event_for_which_its_own_database_is_away_fails_by_itself(scene: Stages, receiver: Recorder) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)
    receiver.after = lambda connection: _no_server(connection) if receiver.calls[-1] == "a-1" else None
    await scene.drain()
    assert scene.states() == {"a-1": "retrying", "b-1": "done"}

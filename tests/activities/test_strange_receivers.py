"""Receivers that misbehave in ways of their own: that is the event's failed attempt, or a hold, and stops nobody."""

import asyncio
from collections.abc import Callable

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

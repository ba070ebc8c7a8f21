"""PostgreSQL under `Database`: snapshots, lost connections, deadlocks, and what counts as our own failure."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from contracts.errors import Unreachable
from store.dialect import is_infrastructure_error
from store.engine import Database
from tests.postgres import missing
from tests.store.scenes import place, rows, scalar, together
from tests.waiting import wait_until


def _cut(postgres: Database, pid: int) -> None:
    with postgres.write() as other:
        other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")


def test_a_read_stays_at_its_instant(postgres: Database) -> None:
    with postgres.read() as connection:
        count = "SELECT count(*) FROM orders"
        assert connection.exec_driver_sql(count).scalar() == 0
        place(postgres, 1)
        assert connection.exec_driver_sql(count).scalar() == 0
    assert scalar(postgres, count) == 1


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_connection_that_is_lost_is_our_own_failure_and_the_next_write_works(
    postgres: Database, savepoint: bool
) -> None:
    def lose_it() -> None:
        with postgres.write() as connection:
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            if savepoint:
                with connection.begin_nested():
                    _cut(postgres, pid)
                    connection.exec_driver_sql("SELECT 1")
            else:
                _cut(postgres, pid)
                connection.exec_driver_sql("SELECT 1")

    with pytest.raises(DBAPIError) as raised:
        lose_it()
    assert is_infrastructure_error(raised.value)
    place(postgres, 1)


def test_a_server_that_is_made_read_only_takes_no_write_from_a_connection_that_has_read(
    postgres: Database, postgres_admin: sa.Engine
) -> None:
    """As some providers do it when the disk is nearly full."""

    def read_only() -> bool:
        with postgres.read() as connection:
            connection.exec_driver_sql("SELECT 1")
        with postgres.write() as connection:
            return bool(connection.exec_driver_sql("SHOW transaction_read_only").scalar_one() == "on")

    assert not read_only()
    with postgres_admin.connect() as admin:
        admin.exec_driver_sql("ALTER SYSTEM SET default_transaction_read_only = on")
        admin.exec_driver_sql("SELECT pg_reload_conf()")
        try:
            wait_until(read_only, 60, "its write transactions are read-only too")
            with pytest.raises(DBAPIError) as raised:
                place(postgres, 1)
            assert is_infrastructure_error(raised.value)
        finally:
            admin.exec_driver_sql("ALTER SYSTEM RESET default_transaction_read_only")
            admin.exec_driver_sql("SELECT pg_reload_conf()")
    wait_until(lambda: not read_only(), 60, "it takes writes again")
    place(postgres, 1)


def test_connections_that_were_cut_while_idle_are_replaced(postgres: Database) -> None:
    with postgres.write() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with psycopg.connect(str(postgres.url.set(drivername="postgresql").render_as_string(False))) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    place(postgres, 1)
    assert scalar(postgres, "SELECT count(*) FROM orders") == 1


def test_of_two_transactions_in_a_deadlock_one_commits_and_the_other_is_our_own_failure(postgres: Database) -> None:
    place(postgres, 1, 2)
    gate = threading.Barrier(2)

    def swap(first: int, second: int) -> None:
        with postgres.write() as connection:
            connection.exec_driver_sql("SET LOCAL deadlock_timeout = '50ms'")
            connection.exec_driver_sql(f"UPDATE orders SET sku = 'x' WHERE id = 'order-{first}'")
            gate.wait(60)
            connection.exec_driver_sql(f"UPDATE orders SET sku = 'x' WHERE id = 'order-{second}'")

    results = together(lambda: swap(1, 2), lambda: swap(2, 1))
    (failed,) = [result for result in results if result is not None]
    assert isinstance(failed.orig, psycopg.errors.DeadlockDetected)
    assert is_infrastructure_error(failed)
    assert rows(postgres, "SELECT sku FROM orders") == [("x",), ("x",)]


@pytest.mark.parametrize(
    "setting", ["SET LOCAL transaction_read_only = on", "SET LOCAL statement_timeout = '20ms'; SELECT pg_sleep(1)"]
)
def test_a_standby_and_a_time_out_are_our_own_failure(postgres: Database, setting: str) -> None:
    def run() -> None:
        with postgres.write() as connection:
            connection.exec_driver_sql(setting)
            connection.exec_driver_sql("UPDATE control SET epoch = 1")

    with pytest.raises(DBAPIError) as raised:
        run()
    assert is_infrastructure_error(raised.value)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("SELECT nothing FROM nowhere", ProgrammingError),
        ("SELEKT", ProgrammingError),
        ("INSERT INTO receivers VALUES (NULL)", IntegrityError),
        ("SELECT 1 / 0", DBAPIError),
    ],
)
def test_a_wrong_statement_is_its_authors_fault(postgres: Database, wrong: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised, postgres.write() as connection:
        connection.exec_driver_sql(wrong)
    assert not is_infrastructure_error(raised.value)


def test_a_savepoint_that_was_rolled_back_lets_the_transaction_go_on(postgres: Database) -> None:
    with postgres.write() as connection:
        with pytest.raises(ProgrammingError), connection.begin_nested():
            connection.exec_driver_sql("SELEKT")
        connection.execute(sa.text("UPDATE control SET epoch = 3"))
    assert scalar(postgres, "SELECT epoch FROM control") == 3


def test_an_exhausted_pool_is_our_own_failure(postgres: Database) -> None:
    small = sa.create_engine(
        postgres.url.set(drivername="postgresql+psycopg"), pool_size=1, max_overflow=0, pool_timeout=0.01
    )
    with small.connect(), pytest.raises(sa.exc.TimeoutError) as raised:
        small.connect()
    assert is_infrastructure_error(raised.value)
    small.dispose()


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    database = Database("postgresql://saisei:secret@127.0.0.1:1/saisei")
    with pytest.raises(Unreachable, match="does not answer") as raised:
        database.ping()
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    with pytest.raises(DBAPIError) as lost, database.write():
        pass
    assert is_infrastructure_error(lost.value)
    database.close()


def test_the_tests_server_goes_when_its_parent_is_killed(postgres: Database) -> None:
    """Uses the running helper's own way: a second server, whose parent is killed with SIGKILL."""
    if missing():
        pytest.skip("no PostgreSQL")
    code = (
        "import sys; from tests.postgres import postgres_server\n"
        "with postgres_server() as url: print(url, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        url = sa.make_url(parent.stdout.readline().strip()).render_as_string(hide_password=False)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        parent.kill()

        def gone() -> bool:
            try:
                psycopg.connect(url).close()
            except psycopg.OperationalError:
                return True
            return False

        wait_until(gone, 60, "the server stops")
        folder = Path(str(sa.make_url(url).query["host"])).parent
        wait_until(lambda: not folder.exists(), 60, "its folder is removed")

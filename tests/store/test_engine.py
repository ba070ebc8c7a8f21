"""SQLite under `Database`: no update is lost, snapshots hold, what fails is told apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from contracts.errors import InvalidInput, StoreBusy, TransactionLost, Unreachable
from store.dialect import is_infrastructure_error
from store.engine import Database
from tests.store.processes import Script
from tests.store.scenes import bump, read_counter, scalar, together


@pytest.mark.parametrize("way", ["write", "read"])
def test_each_connection_is_in_wal_mode_synced_in_full_with_foreign_keys(sqlite: Database, way: str) -> None:
    opener = sqlite.write if way == "write" else sqlite.read
    with opener() as connection:
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert settings == ["wal", 2, 1]


def test_twelve_threads_that_read_and_then_write_lose_no_update(counter: Database) -> None:
    together(*[lambda: [bump(counter) for _ in range(25)]] * 12)
    assert read_counter(counter) == 300


def test_two_databases_of_one_file_lose_no_update(counter: Database, open_database: Callable[..., Database]) -> None:
    other = open_database(str(counter.url))
    together(*[lambda d=d: [bump(d) for _ in range(25)] for d in (counter, other, counter, other)])
    assert read_counter(counter) == 100


def test_a_savepoint_that_was_rolled_back_does_not_survive(counter: Database) -> None:
    with counter.write() as connection:
        connection.exec_driver_sql("UPDATE counter SET n = 1")
        inner = connection.begin_nested()
        connection.exec_driver_sql("UPDATE counter SET n = 2")
        inner.rollback()
    assert read_counter(counter) == 1


def test_a_savepoint_does_not_survive_the_rollback_of_its_transaction(counter: Database) -> None:
    with counter.write() as connection:
        with connection.begin_nested():
            connection.exec_driver_sql("UPDATE counter SET n = 2")
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert read_counter(counter) == 0


def test_tables_made_in_a_transaction_that_fails_are_gone(sqlite: Database) -> None:
    with sqlite.write() as connection:
        connection.exec_driver_sql("CREATE TABLE short_lived (n INTEGER)")
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert scalar(sqlite, "SELECT count(*) FROM sqlite_master WHERE name = 'short_lived'") == 0


def test_a_read_stays_at_its_instant_and_waits_for_no_writer(counter: Database) -> None:
    with counter.read() as connection:
        assert connection.exec_driver_sql("SELECT n FROM counter").scalar() == 0
        bump(counter)
        assert connection.exec_driver_sql("SELECT n FROM counter").scalar() == 0
    with counter.write() as writer:
        writer.exec_driver_sql("UPDATE counter SET n = 50")
        assert read_counter(counter) == 1
    assert read_counter(counter) == 50


def test_a_read_writes_nothing(database: Database) -> None:
    with pytest.raises(DBAPIError), database.read() as connection:
        connection.execute(sa.text("UPDATE control SET epoch = 9"))
    with database.write() as connection:  # the same pooled connection may write again
        connection.execute(sa.text("UPDATE control SET epoch = 5"))
    assert scalar(database, "SELECT epoch FROM control") == 5


@pytest.mark.parametrize("instead", [None, "another.db"])
def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(
    counter: Database, tmp_path: Path, instead: str | None
) -> None:
    """It would be acknowledged, and gone with the process."""
    path = Path(str(counter.url.database))
    aside = tmp_path / "aside.db"
    path.rename(aside)
    if instead:
        (tmp_path / instead).write_bytes(aside.read_bytes())
        (tmp_path / instead).rename(path)
    with pytest.raises(StoreBusy, match="moved, removed or replaced"):
        bump(counter)
    with pytest.raises(StoreBusy, match="moved, removed or replaced"), counter.read():
        pass
    aside.rename(path)
    bump(counter)
    assert read_counter(counter) == 1


def test_a_write_inside_a_write_is_refused_at_once(counter: Database) -> None:
    with counter.write(), pytest.raises(RuntimeError, match="inside a write"), counter.write():
        pass
    bump(counter)
    assert read_counter(counter) == 1


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("SELECT nothing FROM nowhere", OperationalError),
        ("INSERT INTO counter VALUES (NULL)", IntegrityError),
        ("SELEKT", OperationalError),
    ],
)
def test_a_wrong_statement_is_its_authors_fault(counter: Database, wrong: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised, counter.write() as connection:
        connection.exec_driver_sql(wrong)
    assert not is_infrastructure_error(raised.value)
    assert not is_infrastructure_error(ValueError("x"))


def _fill(connection: sa.Connection) -> None:
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    for _ in range(1000):
        connection.exec_driver_sql("INSERT INTO turns (who) VALUES (?)", ("x" * 2000,))


def test_a_full_disk_is_our_own_failure(counter: Database) -> None:
    with pytest.raises(DBAPIError, match="full") as raised, counter.write() as connection:
        _fill(connection)
    assert is_infrastructure_error(raised.value)


def test_after_a_full_disk_in_a_savepoint_nothing_more_is_written(counter: Database) -> None:
    """SQLite takes the whole transaction back then, and would commit each later statement by itself."""
    with counter.write() as connection:
        connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('before')")
        with pytest.raises(TransactionLost) as raised, connection.begin_nested():
            _fill(connection)
        assert is_infrastructure_error(raised.value)
        connection.connection.dbapi_connection.execute("PRAGMA max_page_count = 100000")  # type: ignore[union-attr]
        with pytest.raises(TransactionLost):
            connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('after')")
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert scalar(counter, "SELECT count(*) FROM turns") == 0
    bump(counter)


def test_a_transaction_that_sqlite_took_back_is_not_reported_as_committed(counter: Database) -> None:
    def lose_it() -> None:
        with counter.write() as connection:
            connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('before')")
            connection.connection.dbapi_connection.rollback()  # type: ignore[union-attr]

    with pytest.raises(TransactionLost):
        lose_it()
    assert scalar(counter, "SELECT count(*) FROM turns") == 0
    bump(counter)


def test_a_read_only_database_is_our_own_failure(counter: Database) -> None:
    with counter.write() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
        with pytest.raises(DBAPIError) as raised:
            connection.exec_driver_sql("UPDATE counter SET n = 1")
    assert is_infrastructure_error(raised.value)


def test_a_file_that_is_no_database_does_not_answer(tmp_path: Path, open_database: Callable[..., Database]) -> None:
    path = tmp_path / "notes.db"
    path.write_text("these are notes, and no database at all\n" * 100)
    database = open_database(f"sqlite:///{path}")
    with pytest.raises(Unreachable, match="does not answer") as raised:
        database.ping()
    assert "\n" not in str(raised.value)
    with pytest.raises(DBAPIError) as broken, database.read():
        pass
    assert is_infrastructure_error(broken.value)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "nonsense", "", "postgresql://u:p@host:port/db"]
)
def test_a_database_that_we_cannot_use_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidInput, match="DATABASE_URL"):
        Database(url)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unreachable, match="SAISEI_HOME"):
        Database(f"sqlite:///{tmp_path}/file/saisei.db")


def test_several_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    code = """
import sys
from store.engine import Database
from store.control import initialize
sys.stdin.readline()
database = Database(sys.argv[1])
with database.write() as connection:
    initialize(connection, 1)
with database.read() as connection:
    print("ok", flush=True)
"""
    scripts = [Script(code, f"sqlite:///{tmp_path}/new.db") for _ in range(4)]
    try:
        for script in scripts:
            script.say()
        assert [script.line() for script in scripts] == ["ok"] * 4
    finally:
        for script in scripts:
            script.kill()

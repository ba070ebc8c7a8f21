"""SQLite under `Database`: no update is lost, snapshots hold, the write lock is one and fair."""

import ctypes
import itertools
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from contracts.errors import InvalidInput, StoreBusy, TransactionLost, Unreachable
from store.dialect import is_infrastructure_error
from store.engine import Database
from tests.store.processes import Script
from tests.store.scenes import scalar, together
from tests.waiting import wait_until

HOLD = """
import sys
from store.engine import Database
with Database(sys.argv[1]).write() as connection:
    connection.exec_driver_sql("UPDATE counter SET n = n + 1")
    print("held", flush=True)
    sys.stdin.readline()
"""
# Commits back to back until it is told to stop; each transaction lasts at least so many seconds.
BUSY = """
import sys, threading, time
from store.engine import Database
database = Database(sys.argv[1])
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
while not stop.is_set():
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO turns (who) VALUES (?)", (sys.argv[2],))
        if connection.exec_driver_sql("SELECT count(*) FROM turns WHERE who = ?", (sys.argv[2],)).scalar() == 3:
            print("running", flush=True)
        time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def counter(sqlite: Database) -> Database:
    with sqlite.write() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (n INTEGER NOT NULL)")
        connection.exec_driver_sql("CREATE TABLE turns (id INTEGER PRIMARY KEY AUTOINCREMENT, who TEXT NOT NULL)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")
    return sqlite


def _bump(database: Database) -> None:
    with database.write() as connection:
        n = connection.exec_driver_sql("SELECT n FROM counter").scalar_one()
        connection.exec_driver_sql("UPDATE counter SET n = ?", (n + 1,))


def _read_counter(database: Database) -> int:
    return int(scalar(database, "SELECT n FROM counter"))


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
    together(*[lambda: [_bump(counter) for _ in range(25)]] * 12)
    assert _read_counter(counter) == 300


def test_two_databases_of_one_file_lose_no_update(counter: Database, open_database: Callable[..., Database]) -> None:
    other = open_database(str(counter.url))
    together(*[lambda d=d: [_bump(d) for _ in range(25)] for d in (counter, other, counter, other)])
    assert _read_counter(counter) == 100


def test_a_savepoint_that_was_rolled_back_does_not_survive(counter: Database) -> None:
    with counter.write() as connection:
        connection.exec_driver_sql("UPDATE counter SET n = 1")
        inner = connection.begin_nested()
        connection.exec_driver_sql("UPDATE counter SET n = 2")
        inner.rollback()
    assert _read_counter(counter) == 1


def test_a_savepoint_does_not_survive_the_rollback_of_its_transaction(counter: Database) -> None:
    with counter.write() as connection:
        with connection.begin_nested():
            connection.exec_driver_sql("UPDATE counter SET n = 2")
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert _read_counter(counter) == 0


def test_tables_made_in_a_transaction_that_fails_are_gone(sqlite: Database) -> None:
    with sqlite.write() as connection:
        connection.exec_driver_sql("CREATE TABLE short_lived (n INTEGER)")
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert scalar(sqlite, "SELECT count(*) FROM sqlite_master WHERE name = 'short_lived'") == 0


def test_a_read_stays_at_its_instant_and_waits_for_no_writer(counter: Database) -> None:
    with counter.read() as connection:
        assert connection.exec_driver_sql("SELECT n FROM counter").scalar() == 0
        _bump(counter)
        assert connection.exec_driver_sql("SELECT n FROM counter").scalar() == 0
    with counter.write() as writer:
        writer.exec_driver_sql("UPDATE counter SET n = 50")
        assert _read_counter(counter) == 1
    assert _read_counter(counter) == 50


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
        _bump(counter)
    with pytest.raises(StoreBusy, match="moved, removed or replaced"), counter.read():
        pass
    aside.rename(path)
    _bump(counter)
    assert _read_counter(counter) == 1


def test_a_write_inside_a_write_is_refused_at_once(counter: Database) -> None:
    with counter.write(), pytest.raises(RuntimeError, match="inside a write"), counter.write():
        pass
    _bump(counter)
    assert _read_counter(counter) == 1


def test_a_lock_held_by_another_process_is_one_sentence_and_free_after_its_kill(
    counter: Database, open_database: Callable[..., Database]
) -> None:
    hurried = open_database(str(counter.url), busy_timeout=0.2)
    with Script(HOLD, str(counter.url)) as holder:
        assert holder.line() == "held"
        with pytest.raises(StoreBusy) as raised, hurried.write():
            pass
        assert "\n" not in str(raised.value)
        assert "0.2 s" in str(raised.value)
        assert is_infrastructure_error(raised.value)
        assert _read_counter(hurried) == 0
        holder.kill()  # SIGKILL in the middle of its transaction
        _bump(hurried)
    assert _read_counter(counter) == 1


def test_a_foreign_program_that_holds_the_database_is_the_same_sentence(
    counter: Database, open_database: Callable[..., Database]
) -> None:
    hurried = open_database(str(counter.url), busy_timeout=0.01)
    with closing(sqlite3.connect(str(counter.url.database), isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        for _ in range(60):  # more often than the pool has connections
            with pytest.raises(StoreBusy, match="write lock"), hurried.write():
                pass
        foreign.execute("ROLLBACK")
    _bump(hurried)
    assert _read_counter(counter) == 1


def test_a_second_process_gets_its_turn_between_two_commits_of_a_busy_one(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "busy", "0") as busy:
        assert busy.line() == "running"
        for _ in range(30):
            with counter.write() as connection:
                connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('we')")
        busy.say()
        assert busy.wait() == 0
    with counter.read() as connection:
        order = list(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    ours = [index for index, who in enumerate(order) if who == "we"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ours)]
    # Whoever waits comes next: between two of our writes the busy one has a handful of turns, not hundreds.
    assert len(ours) == 30
    assert sorted(gaps)[len(gaps) // 2] <= 20, gaps
    assert max(gaps) <= 200, gaps


def test_two_busy_processes_share_the_turns(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "a", "0") as a, Script(BUSY, str(counter.url), "b", "0") as b:
        assert (a.line(), b.line()) == ("running", "running")
        for _ in range(40):
            _bump(counter)
        a.say()
        b.say()
        assert (a.wait(), b.wait()) == (0, 0)
    with counter.read() as connection:
        order = "".join(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    together_from = max(order.index("a"), order.index("b"))
    shared = order[together_from:]
    longest = max(len(run) for run in shared.replace("ab", "a b").replace("ba", "b a").split())
    assert longest < max(50, len(shared) // 3), shared


def test_short_transactions_get_as_much_time_as_the_long_ones_beside_them(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "long", "0.03") as long, Script(BUSY, str(counter.url), "short", "0") as short:
        assert (long.line(), short.line()) == ("running", "running")
        begun = int(scalar(counter, "SELECT max(id) FROM turns"))
        count = f"SELECT count(*) FROM turns WHERE who = 'long' AND id > {begun}"
        wait_until(lambda: scalar(counter, count) >= 10, 20, "ten long ones are through")
        long.say()
        short.say()
        assert (long.wait(), short.wait()) == (0, 0)
    with counter.read() as connection:
        order = list(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    last = max(index for index, who in enumerate(order) if who == "long")
    shared = order[begun:last]
    # Turn by turn it would be one each.
    assert shared.count("short") > 4 * shared.count("long"), "".join(who[0] for who in shared)


def test_a_long_transaction_goes_on_when_nobody_uses_the_time_that_is_left_to_others(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "long", "0.03") as long:
        assert long.line() == "running"
        for _ in range(5):
            _bump(counter)
        begun = int(scalar(counter, "SELECT max(id) FROM turns"))
        wait_until(lambda: scalar(counter, "SELECT max(id) FROM turns") >= begun + 5, 20, "the long ones go on")
        long.say()
        assert long.wait() == 0


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
    _bump(counter)


def test_a_transaction_that_sqlite_took_back_is_not_reported_as_committed(counter: Database) -> None:
    def lose_it() -> None:
        with counter.write() as connection:
            connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('before')")
            connection.connection.dbapi_connection.rollback()  # type: ignore[union-attr]

    with pytest.raises(TransactionLost):
        lose_it()
    assert scalar(counter, "SELECT count(*) FROM turns") == 0
    _bump(counter)


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


class Stopped(BaseException):
    """What a time-out raises inside the thread of a synchronous activity, at any line."""


def _raise_in(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))


def test_a_thread_that_is_stopped_in_the_queue_gives_its_place_back(counter: Database) -> None:
    ended: list[str] = []

    def wait_in_line() -> None:
        try:
            with counter.write():
                ended.append("wrote")
        except Stopped:
            ended.append("stopped")

    with counter.write():
        thread = threading.Thread(target=wait_in_line, daemon=True)
        thread.start()
        assert counter._lock is not None
        wait_until(lambda: len(counter._lock._queue) == 2, 10, "the second writer stands in line")  # type: ignore[union-attr]
        _raise_in(thread)
    thread.join(10)
    assert ended == ["stopped"]
    _bump(counter)
    assert _read_counter(counter) == 1


def test_writers_that_are_stopped_anywhere_leave_the_lock_free(counter: Database) -> None:
    lock = counter._lock
    assert lock is not None
    end = threading.Event()
    stopped = [threading.Semaphore(0) for _ in range(3)]

    def work(index: int) -> None:
        while not end.is_set():
            try:
                while not end.is_set():
                    with lock.held():
                        pass
            except Stopped:
                stopped[index].release()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        _raise_in(threads[number % 3])
        assert stopped[number % 3].acquire(timeout=10)
    end.set()
    for thread in threads:
        thread.join(10)
    _bump(counter)
    assert (_read_counter(counter), len(lock._queue)) == (1, 0)

"""The one way into the database: `Database.write()` and `Database.read()`.

SQLite. The driver's own transaction handling lost 274 of 300 concurrent updates without an error: it begins only
before DML and upgrades a read lock late. So it is switched off (`isolation_level=None`) and SQLAlchemy's `begin`
event emits `BEGIN IMMEDIATE` for what writes and plain `BEGIN` for what reads. WAL lets readers go on beside the
writer, `synchronous=FULL` makes an acknowledged commit survive a power loss.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError, DBAPIError

from contracts.errors import NotFound, StoreBusy, Unreachable, WrongSettings
from store.dialect import mark_as_ours, open_driver, run_directly
from store.fairlock import FairLock

_READ = "saisei_read"
_NOWHERE = (0, 0)


def sqlite_url(path: Path) -> sa.URL:
    """The URL of an SQLite file. As text, a `?` in the name of a folder would end the path."""
    return sa.URL.create("sqlite", database=str(path))


class Database:
    """An engine with its locking. Threads and processes may share the database; each makes its own Database."""

    def __init__(self, url: str | sa.URL, *, busy_timeout: float = 5.0, pool_size: int = 40, make: bool = True) -> None:
        """`busy_timeout` in seconds. `make`: an SQLite file that is not there is made, with its folder.

        Raises WrongSettings for a URL that is neither SQLite nor PostgreSQL, Unreachable when the folder of an
        SQLite file cannot be made, NotFound when its file is not there and is not to be made.
        """
        try:
            parsed = sa.make_url(url)
        except (ArgumentError, ValueError):  # ValueError: a port that is no number
            raise WrongSettings({"DATABASE_URL": "is not a database URL"}) from None
        self.url = parsed
        self._lock: FairLock | None = None
        self._writer: Connection | None = None  # SQLite's, between two write transactions; the lock's holder takes it
        self._changes: list[Changes] = []
        self._asked = threading.local()  # `write` is set while this thread opens a transaction by `write`
        if parsed.get_backend_name() == "sqlite":
            self.engine = self._open_sqlite(parsed, busy_timeout, pool_size, make=make)
        elif parsed.get_backend_name() == "postgresql":
            self.engine = self._open_postgresql(parsed, pool_size)
        else:
            raise WrongSettings({"DATABASE_URL": "must begin with sqlite:/// or postgresql://"})
        event.listen(self.engine, "handle_error", mark_as_ours)
        read = {_READ: True}
        self._reader = (
            self.engine.execution_options(**read)
            if self.is_sqlite
            else self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        )

    @property
    def is_sqlite(self) -> bool:
        """Whether there is one writer at a time (SQLite) or many (PostgreSQL)."""
        return self.engine.dialect.name == "sqlite"

    @property
    def writers(self) -> int:
        """How many write transactions of one process are worth running at once."""
        return 1 if self.is_sqlite else 8

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One write transaction: commits at the end of the block, rolls back if it raises.

        Raises StoreBusy when the lock is not had within the busy time-out.
        """
        if self._lock is None:
            with self.engine.begin() as connection:
                yield connection
        else:
            with self._lock.held():
                # Kept, as there is one writer: taking it from the pool and giving it back cost as much as an insert.
                connection, self._writer = self._writer or self.engine.connect(), None
                try:
                    self._asked.write = True
                    with connection.begin():
                        yield connection
                except BaseException:
                    connection.close()  # whatever is wrong with it, the next one starts afresh
                    raise
                self._writer = connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One read-only snapshot: all that the block reads is of one instant."""
        with self._reader.connect() as connection, connection.begin():
            yield connection

    def changes(self) -> "Changes":
        """A watch over what is committed from now on. It belongs to the caller's thread, and ends with `close`."""
        watch = Changes(self.url.database if self.is_sqlite else None)
        self._changes.append(watch)
        return watch

    def ping(self) -> None:
        """Raises Unreachable, in one sentence, when the database does not answer."""
        try:
            with self.read() as connection:
                connection.execute(sa.text("SELECT 1"))
        except DBAPIError as error:
            raise Unreachable(
                f"the database {self.url.render_as_string()} does not answer ({_first_line(error)}); "
                + ("move the file away or restore it" if self.is_sqlite else "start it or correct DATABASE_URL")
            ) from error

    def close(self) -> None:
        """Give all connections and lock files back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.engine.dispose()
        for watch in self._changes:
            watch.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open_postgresql(self, url: sa.URL, pool_size: int) -> Engine:
        try:
            engine = sa.create_engine(
                url.set(drivername="postgresql+psycopg"),
                pool_size=pool_size,
                max_overflow=10,
                pool_pre_ping=True,  # a restarted server must not fail the first transaction after it
                connect_args={"connect_timeout": 5},
            )
        except ImportError as error:
            raise WrongSettings({"DATABASE_URL": "PostgreSQL needs its driver; install psycopg[binary]"}) from error

        @event.listens_for(engine, "checkin")
        def leave_it_to_the_server(connection: Any, _record: Any) -> None:
            # After a read SQLAlchemy asks for READ WRITE by name, also where the server was made read-only.
            if connection is not None:
                connection.read_only = None

        return engine

    def _open_sqlite(self, url: sa.URL, busy_timeout: float, pool_size: int, *, make: bool) -> Engine:
        if not url.database or url.database == ":memory:":
            raise WrongSettings({"DATABASE_URL": "an SQLite database must be a file"})
        path = Path(url.database)
        if not make and _identity(path) == _NOWHERE:
            # A mistyped path would become an empty database, in which all is well.
            raise NotFound(
                f"there is no database {path}; `starter.py init` makes one, or correct DATABASE_URL or SAISEI_HOME"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FairLock(str(path), busy_timeout)
        except OSError as error:
            raise Unreachable(
                f"{path.parent} cannot be written ({_plain(error)}); choose another folder with SAISEI_HOME"
            ) from error
        engine = sa.create_engine(
            url,
            pool_size=pool_size,
            max_overflow=10,
            pool_use_lifo=True,  # each connection has a page cache of its own: the warm one again, and few of them
            connect_args={
                "isolation_level": None,
                "timeout": busy_timeout,
                "check_same_thread": False,
            },
        )

        engine.dialect.statement_compiler = _WithIndexHints
        # SQLAlchemy compiles each of these anew: a quarter of what a receiver's event took.
        for name, words in (("", "SAVEPOINT"), ("rollback_to_", "ROLLBACK TO"), ("release_", "RELEASE")):
            setattr(engine.dialect, f"do_{name}savepoint", _savepoint(words))
        opened: list[tuple[int, int]] = []

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: object) -> None:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16384"):
                connection.execute(f"PRAGMA {pragma}").close()
            if not opened:
                opened.append(_identity(path))

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            reading = connection.get_execution_options().get(_READ, False)
            if not reading and not self._asked.__dict__.pop("write", False):
                # It would wait for the lock that its own thread may hold, and pass by the fair lock otherwise.
                raise RuntimeError("write through Database.write; a receiver, through the connection that it is given")
            if _identity(path) != opened[0]:
                # What is written to the old file is gone with this process, and acknowledged all the same.
                raise StoreBusy(
                    f"the database {path} was moved, removed or replaced under this process; put the file back, "
                    "or restart the process with the one that is there"
                )
            driver = connection.connection.driver_connection
            assert driver is not None
            # A write from a read would pass the fair lock by, and fail at once where another one writes.
            driver.execute(f"PRAGMA query_only = {int(reading)}").close()
            try:
                driver.execute("BEGIN" if reading else "BEGIN IMMEDIATE").close()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
                raise StoreBusy(
                    f"a program that is none of Saisei's has held the database's write lock for more than "
                    f"{busy_timeout:g} s; close it and try again"
                ) from error

        @event.listens_for(engine, "before_cursor_execute")
        def _execute(connection: Connection, *_: object) -> None:
            open_driver(connection)

        @event.listens_for(engine, "commit")
        def _commit(connection: Connection) -> None:
            open_driver(connection)

        return engine


class Changes:
    """Whether anybody has committed since the last question, at a hundredth of what a read costs: for those who look
    many times a second for work that anybody may write."""

    def __init__(self, path: str | None) -> None:
        """`path`: SQLite's file; None for a database that cannot tell."""
        self._path = None if path is None else Path(path)
        self._connection: sqlite3.Connection | None = None
        self._file = _NOWHERE
        self._version: int | None = None
        self._nothing = False

    @property
    def can_tell(self) -> bool:
        """Whether this database tells of commits; where it does not, every look is worth it."""
        return self._path is not None

    def worth_a_look(self) -> bool:
        """False when the last look found nothing and nobody has committed since. A look that fails is worth another."""
        changed = self.any()
        if self._nothing and not changed:
            return False
        self._nothing = False
        return True

    def found_nothing(self) -> None:
        """The look found nothing, and only a commit can change that."""
        self._nothing = True

    def any(self) -> bool:
        """True also where it cannot be told. Ask before the read that shows what there is: what is committed between
        the two is told of once more, and none is missed."""
        if self._path is None:
            return True
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
                self._file = _identity(self._path)
            version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:
            return True  # whoever reads now gets to know why
        # Nobody commits to a file that was moved away; the next transaction says so.
        changed = bool(version != self._version) or _identity(self._path) != self._file
        self._version = version
        return changed

    def finds(self, question: str) -> bool:
        """Whether the SELECT has a row; True also where it cannot be told. It runs in the caller's thread, so it must
        be one that an index answers at once."""
        try:
            return self._connection is None or self._connection.execute(question).fetchone() is not None
        except sqlite3.Error:
            return True

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _WithIndexHints(SQLiteCompiler):
    """Renders `.with_hint(table, "INDEXED BY ...")`, which SQLAlchemy leaves out for SQLite."""

    def get_from_hint_text(self, table: sa.FromClause, text: str | None) -> str | None:
        return text


def _savepoint(words: str) -> Callable[[Connection, str], None]:
    return lambda connection, name: run_directly(connection, f"{words} {name}")


def _identity(path: Path) -> tuple[int, int]:
    """Which file stands at the path just now."""
    try:
        found = os.stat(path)
    except OSError:
        return _NOWHERE
    return (found.st_dev, found.st_ino)


def _plain(error: OSError) -> str:
    return "a file of that name is in the way" if isinstance(error, FileExistsError) else str(error.strerror)


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else "no answer"

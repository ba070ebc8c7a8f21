"""Everything that differs between SQLite and PostgreSQL beside opening a connection (engine.py)."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.exc import DBAPIError

from contracts.errors import StoreBusy, TransactionLost

MAX_ERROR = 4000  # characters kept of an error's text
_INTAKE_LOCK = 0x5A15E1  # advisory lock: shared by intake, exclusive for a pause
_AGGREGATE_LOCKS = 0x5A15E2  # advisory lock space: one key an aggregate


class Rendered:
    """A statement that everyone waits for, rendered once for each of the two databases. SQLite's driver gets it
    directly: SQLAlchemy's way there and back takes several times as long as such a statement.

    The driver takes the parameters as they are, so they must be what it knows: texts, integers, and what `pack` makes.
    """

    def __init__(self, build: Callable[[Connection], Any], *names: str) -> None:
        """`names`: of an INSERT the columns that it fills, in the table's order; else the bound parameters."""
        self._build = build
        self._names = names
        self._texts: dict[tuple[str, bool], str] = {}

    def rows(self, connection: Connection, *parameters: Any) -> Sequence[Sequence[Any]]:
        """The rows that it finds; its parameters in the order of their names."""
        text = self._text(connection)
        if connection.dialect.name != "sqlite":
            return connection.exec_driver_sql(text, parameters).all()
        with _AsOurs(text):
            found: list[tuple[Any, ...]] = open_driver(connection).execute(text, parameters).fetchall()
            return found

    def many(self, connection: Connection, *parameters: Any) -> Sequence[Sequence[Any]]:
        """As `rows`, of a SELECT that finds many, in its order; short texts, integers and NULL only.

        SQLite makes one row of them: its driver lets go of Python's lock and takes it again for each row, which costs
        more than to find the row, and most where other threads want it.
        """
        if connection.dialect.name != "sqlite":
            return self.rows(connection, *parameters)
        text = self._text(connection, gathered=True)
        with _AsOurs(text):
            ((*columns,),) = open_driver(connection).execute(text, parameters).fetchall()
        return [*zip(*map(json.loads, columns), strict=True)]

    def count(self, connection: Connection, *parameters: Any) -> int:
        """How many rows it wrote; its parameters in the order of their names."""
        text = self._text(connection)
        if connection.dialect.name != "sqlite":
            kept = connection.execution_options(preserve_rowcount=True)  # an INSERT's is not kept else
            return kept.exec_driver_sql(text, parameters).rowcount
        with _AsOurs(text):
            written: int = open_driver(connection).execute(text, parameters).rowcount
            return written

    def each(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Once for each of these rows of parameters."""
        text = self._text(connection)
        if connection.dialect.name != "sqlite":
            connection.exec_driver_sql(text, [*rows])
            return
        with _AsOurs(text):
            open_driver(connection).executemany(text, rows).close()

    def _text(self, connection: Connection, *, gathered: bool = False) -> str:
        which = (connection.dialect.name, gathered)
        if which not in self._texts:
            self._texts[which] = self._render(connection, gathered=gathered)
        return self._texts[which]

    def _render(self, connection: Connection, *, gathered: bool) -> str:
        statement, dialect = self._build(connection), connection.dialect
        if not dialect.positional:
            dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
        compiled = statement.compile(dialect=dialect, column_keys=self._names if statement.is_insert else None)
        assert tuple(compiled.positiontup) == self._names, compiled.positiontup
        if not gathered:
            return str(compiled)
        columns = ", ".join(f"json_group_array({name})" for name in statement.selected_columns.keys())  # noqa: SIM118
        return f"SELECT {columns} FROM ({compiled})"


def open_driver(connection: Connection) -> Any:
    """The driver's connection to SQLite. Raises TransactionLost when no transaction is open on it: after a full disk or
    an I/O error SQLite takes the whole of it back, savepoints and all, and each statement that follows would be
    committed by itself."""
    driver = connection.connection.driver_connection
    if driver is None or not driver.in_transaction:
        raise TransactionLost
    return driver


def run_directly(connection: Connection, text: str) -> None:
    """A statement without parameters and without rows, by SQLite's driver."""
    with _AsOurs(text):
        open_driver(connection).execute(text).close()


class _AsOurs:
    """What SQLite's driver raises in the block becomes what SQLAlchemy makes of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, sqlite3.Error):
            wrapped = DBAPIError.instance(self._text, None, error, sqlite3.Error)
            wrapped.add_note(_OURS)
            raise wrapped from error


def insert(connection: Connection, table: Table) -> Any:
    """An INSERT with `.on_conflict_do_nothing()` / `.on_conflict_do_update()`, which both databases know.

    Remove repeated keys before a bulk upsert: PostgreSQL refuses to update one row twice in a statement.
    """
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def value_list(connection: Connection, name: str, kind: type[str] | type[int]) -> Any:
    """A one-column table (`.c.value`) that is bound as a whole: `IN (SELECT value ...)` or a join with it takes one
    parameter however many values there are. Bind it to `pack(connection, values)`."""
    if connection.dialect.name == "sqlite":
        return sa.func.json_each(sa.bindparam(name)).table_valued("value", name=name)
    element = sa.Text if kind is str else sa.BigInteger
    array = sa.cast(sa.bindparam(name), postgresql.ARRAY(element))
    return sa.func.unnest(array).table_valued(sa.column("value", element), name=name).render_derived()


def pack(connection: Connection, values: Sequence[str] | Sequence[int]) -> Any:
    """`values` as `value_list` takes them."""
    return json.dumps(list(values)) if connection.dialect.name == "sqlite" else list(values)


def index_of(connection: Connection, column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[int]:
    """Where `text` begins in `column`, from 1, or 0; letters are told apart by case on both databases, unlike LIKE."""
    find = sa.func.instr if connection.dialect.name == "sqlite" else sa.func.strpos
    return find(column, text, type_=sa.Integer)


def for_update(
    connection: Connection, statement: sa.Select[Any], *, shared: bool = False, of: Table | None = None
) -> sa.Select[Any]:
    """`statement` with its rows (of a join: those `of` one table) locked until the transaction ends; SQLite's one
    writer needs no row locks."""
    return statement if connection.dialect.name == "sqlite" else statement.with_for_update(read=shared, of=of)


def json_text(connection: Connection, column: Any, key: str) -> Any:
    """The text under `key` of a JSON object that is kept as text."""
    if connection.dialect.name == "sqlite":
        return sa.func.json_extract(column, sa.literal_column(f"'$.{key}'"))
    return sa.cast(column, postgresql.JSONB).op("->>")(sa.literal_column(f"'{key}'"))


def json_integer(connection: Connection, column: Any, key: str) -> Any:
    """The integer under `key` of a JSON object that is kept as text."""
    text = json_text(connection, column, key)
    # SQLite gives the number as it is, and a cast would cut 1.5 down to 1 where the column's check refuses it.
    return text if connection.dialect.name == "sqlite" else sa.cast(text, sa.BigInteger)


def json_quoted(connection: Connection, text: Any) -> Any:
    """The text as a JSON string, with its quotes."""
    if connection.dialect.name == "sqlite":
        return sa.func.json_quote(text)
    return sa.cast(sa.func.to_json(text), sa.Text)


def join_lines(connection: Connection, line: Any) -> Any:
    """Aggregate: the lines, a newline between each two, in the order of the rows; NULL where there are none."""
    join = sa.func.group_concat if connection.dialect.name == "sqlite" else sa.func.string_agg
    return join(line, "\n")


def by_index(statement: sa.Select[*tuple[Any, ...]], table: Table, index: str) -> sa.Select[*tuple[Any, ...]]:
    """`statement` with `table` read through `index` where SQLite, which has no statistics, would choose worse."""
    return statement.with_hint(table, f"INDEXED BY {index}", "sqlite")


def at_most(statement: sa.Select[*tuple[Any, ...]], name: str) -> sa.Select[*tuple[Any, ...]]:
    """`statement` with a bound LIMIT, and no OFFSET bound beside it, as SQLAlchemy has it for SQLite."""
    return statement.limit(sa.bindparam(name)).offset(sa.literal_column("0"))


def lock_intake(connection: Connection, *, exclusive: bool) -> None:
    """Shared while an intake transaction runs; exclusive waits for all of them and lets none in (a pause).

    An advisory lock on PostgreSQL: `FOR SHARE` rows let intakes overtake a waiting pause for 1.6 s, this took 40 ms.
    """
    if connection.dialect.name == "postgresql":
        take = sa.func.pg_advisory_xact_lock if exclusive else sa.func.pg_advisory_xact_lock_shared
        connection.execute(sa.select(take(_INTAKE_LOCK)))


def lock_tables(connection: Connection, *tables: Table) -> None:
    """Wait for every transaction that has written to these and let none begin to, until this one ends. For a moment
    only: it stops intake too where `outbox` is among them. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        names = ", ".join(table.name for table in tables)
        connection.execute(sa.text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


def lock_aggregates(connection: Connection, aggregate_ids: Sequence[str]) -> None:
    """One writer at a time for each aggregate, so that `seq` has no gap and positions ascend with it.

    Taken in one order everywhere, so that two batches cannot wait for each other.
    """
    if connection.dialect.name == "postgresql":
        take = sa.text("SELECT pg_advisory_xact_lock(:space, hashtext(:key))")
        for aggregate_id in sorted(set(aggregate_ids)):
            connection.execute(take, {"space": _AGGREGATE_LOCKS, "key": aggregate_id})


def storable(text: str, most: int) -> str:
    """`text` as both databases can hold it: no NUL, no lone surrogate, at most `most` characters."""
    return text[:most].encode(errors="backslashreplace").decode().replace("\0", "\\x00")[:most]


_OURS = "in Saisei's own database"
# Primary result codes of SQLite that speak of the server side: busy, locked, out of memory, read-only, interrupted,
# I/O, corrupt, full, cannot open, protocol, not a database. https://www.sqlite.org/rescode.html
_SQLITE_OURS = frozenset({5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 26})
# Connection, read-only (a standby) and idle transactions ended by the server, transaction rollback (serialization,
# deadlock), resources, lock not available, intervention, system, internal and corrupt.
# https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRES_OURS = ("08", "25006", "25P03", "25P04", "40", "53", "55P03", "57", "58", "XX")


def mark_as_ours(context: sa.engine.ExceptionContext) -> None:
    """For `handle_error` of our engine: the error is of our own database, and not of one that a receiver has."""
    if context.sqlalchemy_exception is not None:
        context.sqlalchemy_exception.add_note(_OURS)


def is_infrastructure_error(error: BaseException) -> bool:
    """Whether our own database failed, rather than a statement that somebody wrote. Such an error never counts
    against an event (a wrong statement in a receiver does)."""
    if isinstance(error, StoreBusy | TransactionLost | sa.exc.TimeoutError):  # the last: no connection in the pool
        return True
    return isinstance(error, DBAPIError) and _OURS in getattr(error, "__notes__", ()) and _server_failed(error)


def is_foreign_outage(error: BaseException) -> bool:
    """Whether a database that is not ours failed, such as a receiver's own: it is that receiver's other side."""
    return isinstance(error, DBAPIError) and _OURS not in getattr(error, "__notes__", ()) and _server_failed(error)


def _server_failed(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    original = error.orig
    if isinstance(original, sqlite3.Error):
        code = getattr(original, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in _SQLITE_OURS
    state = getattr(original, "sqlstate", None)
    # psycopg: no SQLSTATE means that no server answered.
    return (state is None and isinstance(error, sa.exc.OperationalError)) or bool(
        state and state.startswith(_POSTGRES_OURS)
    )

"""Both databases, fresh for each test: an SQLite file copied from a template, and a real PostgreSQL that is emptied."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from store.control import initialize
from store.engine import Database
from store.schema import metadata
from tests.postgres import missing, postgres_server


def set_up(url: str) -> None:
    """The tables and the first rows."""
    database = Database(url)
    with database.write() as connection:
        initialize(connection, 1)
    database.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "saisei.db"
    set_up(f"sqlite:///{path}")  # the last connection to close folds the WAL into the file
    return path


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)  # the project's own run must not pass by skipping half of it
    if reason:
        pytest.skip(reason)
    with postgres_server() as url:
        yield sa.make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def postgres_admin(postgres_server_url: str) -> Iterator[sa.Engine]:
    """An engine outside transactions, on the database that the tests take in turn."""
    # No connection waits between two uses: a test that cuts everybody off would leave a dead one to the next test.
    admin = sa.create_engine(postgres_server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql("ALTER SYSTEM SET fsync = off")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    set_up(postgres_server_url)
    yield admin
    admin.dispose()


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    path = tmp_path / "saisei.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


# Emptying the tables takes a few milliseconds, a new database took 300.
_EMPTY = "; ".join(
    [
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        *(f"DELETE FROM {table.name}" for table in metadata.sorted_tables),
        "ALTER SEQUENCE outbox_position_seq RESTART",
    ]
)


@pytest.fixture
def postgres_url(postgres_admin: sa.Engine, postgres_server_url: str) -> str:
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(_EMPTY)
    with postgres_admin.begin() as connection:
        initialize(connection, 1)
    return postgres_server_url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a set-up, empty database; the test runs once on each kind."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def database_urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], list[str]]]:
    """Makes the URLs of so many databases, for a test that takes several at a time; it runs once on each kind.

    On PostgreSQL they are schemas of one database, whose advisory locks are the same ones: they wait for each other.
    """
    if request.param == "sqlite":
        template = request.getfixturevalue("sqlite_template")

        def copies(count: int) -> list[str]:
            return [f"sqlite:///{shutil.copy(template, tmp_path / f'{number}.db')}" for number in range(count)]

        yield copies
        return
    server, admin = (request.getfixturevalue(name) for name in ("postgres_server_url", "postgres_admin"))
    made: list[str] = []

    def schemas(count: int) -> list[str]:
        made.extend(f"copy_{number}" for number in range(count))
        urls = [
            sa.make_url(server)
            .update_query_dict({"options": f"-csearch_path={name}"})
            .render_as_string(hide_password=False)
            for name in made
        ]
        with admin.connect() as connection:
            for name in made:
                connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        for url in urls:
            set_up(url)
        return urls

    yield schemas
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {', '.join(made)} CASCADE")


@pytest.fixture
def open_database() -> Iterator[Callable[..., Database]]:
    """Opens databases that are closed after the test."""
    opened: list[Database] = []

    def opener(url: str, **options: float) -> Database:
        opened.append(Database(url, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield opener
    for database in opened:
        database.close()


@pytest.fixture
def database(database_url: str, open_database: Callable[..., Database]) -> Database:
    return open_database(database_url)


@pytest.fixture
def sqlite(sqlite_url: str, open_database: Callable[..., Database]) -> Database:
    return open_database(sqlite_url)


@pytest.fixture
def postgres(postgres_url: str, open_database: Callable[..., Database]) -> Database:
    return open_database(postgres_url)

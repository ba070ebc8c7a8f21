"""Both databases, fresh for each test: an SQLite file and a database of a real PostgreSQL, copied from templates."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from store.control import initialize
from store.engine import Database
from tests.postgres import missing, postgres_server

OpenDatabase = Callable[[], Database]


def _initialize(url: str) -> None:
    database = Database(url)
    with database.write() as connection:
        initialize(connection, 1)
    database.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "saisei.db"
    _initialize(f"sqlite:///{path}")  # the last connection to close folds the WAL into the file
    return path


@pytest.fixture(scope="session")
def postgres_admin() -> Iterator[sa.Engine]:
    """An engine outside transactions on the server's own database; `template` is set up there."""
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)  # the project's own run must not pass by skipping half of it
    if reason:
        pytest.skip(reason)
    with postgres_server() as url:
        admin = sa.create_engine(
            sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
        )
        with admin.connect() as connection:
            for statement in (
                "ALTER SYSTEM SET fsync = off",
                "SELECT pg_reload_conf()",
                "CREATE DATABASE template",
            ):
                connection.exec_driver_sql(statement)
        _initialize(admin.url.set(database="template").render_as_string(hide_password=False))
        yield admin


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    path = tmp_path / "saisei.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


_numbers = count(1)


@pytest.fixture
def postgres_url(postgres_admin: sa.Engine) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE template")
    yield postgres_admin.url.set(database=name).render_as_string(hide_password=False)
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a set-up, empty database; the test runs once on each kind."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


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

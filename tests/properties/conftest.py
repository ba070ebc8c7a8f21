"""A worker's parts over each of the two databases, once a session: making them takes longer than emptying them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from embedded import ValkeyServer
from store.engine import Database
from tests.databases import set_up
from tests.properties.world import World


@pytest.fixture(scope="session")
def sqlite_world(sqlite_template: Path, valkey_server: ValkeyServer) -> Iterator[World]:
    # Where the machine has memory for files: syncing is not what is tested here.
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="properties-", dir=fast) as folder:
        shutil.copy(sqlite_template, Path(folder) / "saisei.db")
        with _world(f"sqlite:///{folder}/saisei.db", valkey_server) as world:
            yield world


@pytest.fixture(scope="session")
def postgres_world(postgres_admin: sa.Engine, postgres_server_url: str, valkey_server: ValkeyServer) -> Iterator[World]:
    # A database of its own: emptying the one of the other tests ends everybody's connections.
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE properties")
    url = sa.make_url(postgres_server_url).set(database="properties").render_as_string(hide_password=False)
    set_up(url)
    with _world(url, valkey_server) as world:
        yield world


@contextmanager
def _world(url: str, valkey_server: ValkeyServer) -> Iterator[World]:
    database = Database(url)
    world = World(database, f"{valkey_server.url}/7")  # a Redis database that no other test uses
    yield world
    world.close()
    database.close()


# Of the session, though it only passes another one on: hypothesis would have none that is made for each test.
@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> World:
    """Either database, one after the other."""
    found: World = request.getfixturevalue(f"{request.param}_world")
    return found

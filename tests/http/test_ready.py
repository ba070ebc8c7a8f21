"""`/readyz` and `/livez` while each server is lost under a running API, and once it is back.

Orders need the database alone, so the database alone decides; a process that lives is alive whatever it has lost.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from embedded import TemporalServer, ValkeyServer
from tests.http.server import Api, order, problem, running
from tests.waiting import wait_until


def checks(api: Api) -> dict[str, bool]:
    """Which server answers, of an API that is ready."""
    response = api.client.get("/readyz")
    assert response.status_code == 200, response.text
    document = response.json()
    assert document["ready"] is True
    return {name: check["ok"] for name, check in document["checks"].items()}


@contextmanager
def lost(postgres_url: str) -> Iterator[None]:
    """For the block nobody can connect, and who was connected is cut off."""
    socket = Path(str(sa.make_url(postgres_url).query["host"])) / ".s.PGSQL.5432"
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    hidden = socket.with_name("hidden")
    with engine.connect() as connection:
        socket.rename(hidden)
        try:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            yield
        finally:
            hidden.rename(socket)
    engine.dispose()


def test_without_the_database_it_is_alive_and_not_ready(tmp_path: Path, postgres_url: str) -> None:
    with running(tmp_path / "home", DATABASE_URL=postgres_url) as api:
        assert api.place(order(1)).status_code == 201
        assert checks(api)["database"]
        with lost(postgres_url):
            assert api.client.get("/livez").json() == {"alive": True}
            document = problem(api.client.get("/readyz"), 503)
            assert document["type"] == "urn:saisei:problem:not-ready"
            assert document["ready"] is False
            assert document["checks"]["database"] == {"ok": False, "detail": "does not answer; no order can be taken"}
            problem(api.place(order(2)), 503)
            problem(api.client.get("/status"), 503)
        wait_until(lambda: api.client.get("/readyz").status_code == 200, 60, "it is ready again")
        assert api.place(order(2)).status_code == 201
        assert api.client.get("/status").json()["orders"] == 2


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="there is no limit to the size of files here")
def test_with_a_full_disk_it_is_not_ready_until_there_is_room_again(tmp_path: Path) -> None:
    with running(tmp_path / "home") as api:
        assert api.place(order(1)).status_code == 201
        assert api.client.get("/readyz").status_code == 200
        process, log = psutil.Process(api.process.pid), api.home / "saisei.db-wal"
        process.rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size, psutil.RLIM_INFINITY))
        problem(api.place(order(2)), 503)
        for _ in range(3):  # as long as it lasts
            document = problem(api.client.get("/readyz"), 503)
            assert document["detail"] == "the database answers and takes no writes; no order can be taken"
            assert document["checks"]["database"]["ok"] is False
        assert api.client.get("/livez").status_code == 200
        assert api.client.get("/status").json()["orders"] == 1
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        # No order comes to an API that is not ready, and it finds out all the same.
        assert api.client.get("/readyz").status_code == 200
        assert api.place(order(2)).status_code == 201


@contextmanager
def read_only(postgres_url: str) -> Iterator[None]:
    """For the block PostgreSQL takes no writes from anybody, sessions that are open included."""
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("ALTER SYSTEM SET default_transaction_read_only = on")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            connection.exec_driver_sql("ALTER SYSTEM RESET default_transaction_read_only")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
    engine.dispose()


def test_on_a_database_that_is_read_only_it_is_not_ready_until_that_takes_writes_again(
    tmp_path: Path, postgres_url: str
) -> None:
    numbers = itertools.count(1)
    with running(tmp_path / "home", DATABASE_URL=postgres_url) as api:
        assert api.place(order(next(numbers))).status_code == 201
        with read_only(postgres_url):
            # A session learns of it before its next statement, but not before the server has told it.
            wait_until(lambda: api.place(order(next(numbers))).status_code == 503, 60, "an order is refused")
            document = problem(api.client.get("/readyz"), 503)
            assert document["detail"] == "the database answers and takes no writes; no order can be taken"
            assert api.client.get("/livez").status_code == 200
        wait_until(lambda: api.client.get("/readyz").status_code == 200, 60, "it is ready again")
        assert api.place(order(next(numbers))).status_code == 201


@pytest.mark.parametrize("away", ["redis", "temporal"])
def test_without_redis_or_temporal_it_is_ready_and_says_which_is_away(tmp_path: Path, away: str) -> None:
    home = tmp_path / "home"
    servers = {"redis": ValkeyServer(home), "temporal": TemporalServer(home, headless=True)}
    for server in servers.values():
        server.start()
    try:
        for server in servers.values():
            server.wait_ready()
        env = {"REDIS_URL": servers["redis"].url, "TEMPORAL_ADDRESS": servers["temporal"].address}  # type: ignore[attr-defined]
        with running(home, **env) as api:
            wait_until(lambda: all(checks(api).values()), 60, "all answer")
            servers[away].kill()
            expected = {"database": True, "redis": away != "redis", "temporal": away != "temporal"}
            wait_until(lambda: checks(api) == expected, 60, "it is told")
            assert api.place(order(1)).status_code == 201
            assert api.client.get("/livez").status_code == 200
            servers[away].start()
            servers[away].wait_ready()
            wait_until(lambda: all(checks(api).values()), 60, "all answer again")
    finally:
        for server in servers.values():
            server.kill()

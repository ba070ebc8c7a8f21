"""A Redis that answers and refuses pushes is told from one that is well, by a question that writes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from contracts.errors import Refused
from pipeline.event_list import EventList, connect
from tests.commands.cli import Cli
from tests.http.server import Api, running
from tests.waiting import wait_until

WORDS = {
    "out of memory": r"command not allowed when used memory > 'maxmemory'",
    "a replica": r"You can't write against a read only replica",
    "too few replicas": r"NOREPLICAS Not enough good replicas to write",
}


@pytest.fixture(params=WORDS)
def refusing(request: pytest.FixtureRequest, redis_url: str) -> Iterator[str]:
    """The URL of a server that answers and takes no pushes, each for another reason."""
    with redis.Redis.from_url(redis_url) as client:
        client.rpush("outbox.events", "order-1:placed")
        try:
            if request.param == "out of memory":
                client.config_set("maxmemory", 1)
            elif request.param == "a replica":
                client.replicaof("127.0.0.1", "1")
            else:
                client.config_set("min-replicas-to-write", 1)
            with pytest.raises(redis.ResponseError, match=WORDS[request.param]):
                client.rpush("outbox.events", "order-2:placed")
            yield redis_url
            assert client.llen("outbox.events") == 1
            assert client.keys() == [b"outbox.events"]
        finally:
            client.replicaof("NO", "ONE")
            client.config_set("maxmemory", 0)
            client.config_set("min-replicas-to-write", 0)


def test_the_reason_is_the_servers_own(refusing: str) -> None:
    events = EventList(connect(refusing))
    events.ping()
    words = "|".join(WORDS.values())
    with pytest.raises(Refused, match=rf"^Redis at 127\.0\.0\.1:[0-9]+ refuses pushes \(({words})\); events wait"):
        events.require_pushes()
    events.close()


def test_a_server_that_is_well_is_asked_and_nothing_is_written(redis_url: str) -> None:
    events = EventList(connect(redis_url))
    with redis.Redis.from_url(redis_url) as client:
        before = client.info("persistence")["rdb_changes_since_last_save"]
        for _ in range(3):
            events.require_pushes()
        assert client.keys() == []
        assert client.info("persistence")["rdb_changes_since_last_save"] == before
    events.close()


def test_status_and_check_name_it(tmp_path: Path, refusing: str) -> None:
    cli = Cli(tmp_path / "home")
    assert cli("init").exit_code == 0
    env = {"REDIS_URL": refusing}
    assert "refuses pushes (" in cli.json("status", env=env)["redis"]
    checked = cli("check", "--json", env=env)
    assert checked.exit_code == 1
    assert "refuses pushes (" in checked.json["redis"]["detail"]


def test_the_api_is_ready_and_says_it(tmp_path: Path, refusing: str) -> None:
    def redis_check(api: Api) -> object:
        response = api.client.get("/readyz")
        assert response.status_code == 200
        return response.json()["checks"]["redis"]

    expected = {
        "ok": False,
        "detail": "answers and takes no writes; orders are taken all the same and flow once it is back",
    }
    with running(tmp_path / "home", REDIS_URL=refusing) as api:
        wait_until(lambda: redis_check(api) == expected, 60, "it is told")

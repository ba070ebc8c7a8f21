"""`up` and `down` on a home of their own, with a Redis that is configured."""

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

import embedded
from embedded import Child, EmbeddedError, Stack
from tests.commands.cli import Cli, ended
from tests.commands.conftest import Inside
from tests.commands.test_orders import ALL_DONE, states_of
from tests.embedded.processes import processes_of
from tests.waiting import wait_until


def test_up_starts_what_is_not_configured_and_down_stops_it(stack: Stack, tmp_path: Path) -> None:
    url = f"{str(stack.redis_url).rpartition('/')[0]}/5"
    configured = {"REDIS_URL": url}
    cli = Cli(tmp_path / "a home")
    try:
        up = cli.json("up", env=configured)
        assert (up["started"], up["redis"]) == (True, url)
        assert up["links"]["relay"] == f"{up['ui']}/namespaces/default/workflows/relay"
        assert not (tmp_path / "a home" / "valkey").exists()

        again = cli("up", env=configured)
        assert (again.exit_code, again.stderr) == (0, "it is up already\n")
        assert f"Temporal  {up['temporal']}" in again.lines
        cli("up", "--ui-port", "1", env=configured).refused("it is up on other ports than 1")
        cli("up").refused("it is up without valkey")

        cli("up", "--api-port", "1", env=configured).refused("it is up on other ports than 1")

        # Without a URL the command finds the API of this home, wherever another one runs.
        placed = cli("orders", "place", "--id", "far", "--sku", "tea", "--amount", "7", "--api", env=configured)
        assert placed.lines == ["1 order placed"]
        wait_until(lambda: states_of(cli, "far") == ALL_DONE, 60, "the order is at every receiver")
        with redis.Redis.from_url(url) as client:
            # The list is cleared after the commit that made the deliveries, and those may be quicker.
            wait_until(lambda: client.hkeys("processed") == [b"far:placed"], 60, "it is noted as processed")
        assert cli.json("read-api", env=configured)["totals"] == {"JPY": {"orders": 1, "amount": 7}}
        assert up["api"] == embedded.find(cli.home).url("api")  # type: ignore[union-attr]
    finally:
        down = cli("down")
    assert (down.exit_code, down.lines) == (0, ["stopped"])
    assert cli("down").lines == ["nothing is running here"]


def test_ctrl_c_ends_a_start_and_what_was_started_half(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    starting = cli.start("up")
    try:
        assert starting.stderr is not None
        assert starting.stderr.readline() == "starting Valkey, Temporal, worker, api ...\n"
        note = cli.home / "run" / "stack.json"
        wait_until(lambda: note.exists() and "valkey" in note.read_text(), 60, "a server is started")
    finally:
        result = ended(starting, interrupt=True)
    assert (result.exit_code, result.stderr) == (130, "starter.py: interrupted\n")
    wait_until(lambda: not processes_of(cli.home), 60, "no process is left")


def test_a_port_that_was_asked_for_is_had_or_refused(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cli("up", "--api-port", port).refused(f"port {port} on 127.0.0.1 is taken", "--api-port")
        cli("up", env={"SAISEI_API_PORT": port}).refused(f"port {port} on 127.0.0.1 is taken")
        cli("up", env={"SAISEI_API_PORT": "x"}).refused("SAISEI_API_PORT: 'x' is not a port", code=2)
    assert embedded.find(cli.home) is None


@pytest.mark.parametrize("there", [True, False], ids=["and keeps it", "and is down again"])
def test_the_default_port_is_given_up_to_another_start_that_takes_it_meanwhile(
    inside: Inside, nothing: Cli, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    port = embedded.any_free()
    tried = []
    with socket.socket() as other:

        def start(home: Path, *, children: Sequence[Child], **_: object) -> Stack:
            tried.append(children[-1].url)
            if len(tried) == 1 and there:
                other.bind(("127.0.0.1", port))
                other.listen()
            raise EmbeddedError("api did not become ready")

        monkeypatch.setattr("commands.stack.DEFAULT_PORT", port)
        monkeypatch.setattr("commands.stack.embedded.start", start)
        assert inside(nothing, "up").exit_code == 1
    first, second = tried
    assert first == f"http://127.0.0.1:{port}"
    assert second is not None
    assert (second != first) is there

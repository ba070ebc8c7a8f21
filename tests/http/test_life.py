"""The API's life: starts, stops, kills, and servers that are away. What was acknowledged is never lost."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

import api as api_program
from contracts.errors import InvalidInput, WrongSettings
from http_api.settings import ApiSettings
from store.schema import orders, outbox
from tests.http.server import ROOT, Api, database_of, environment, order, problem, running
from tests.waiting import wait_until

# Dies after it committed that many groups, before the last of them is answered.
DYING = (
    "import os, signal, sys, intake\n"
    "place_all, left = intake.Intake.place_all, {groups}\n"
    "def dying(self, take):\n"
    "    global left\n"
    "    answers = place_all(self, take)\n"
    "    left -= 1\n"
    "    if left == 0:\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    return answers\n"
    "intake.Intake.place_all = dying\n"
    "import api, config; config.end(api.main())\n"
)


def recorded(home: Path) -> set[str]:
    """The ids of the orders that have their row and their event."""
    with database_of(home) as database, database.read() as connection:
        ids = set(connection.execute(sa.select(orders.c.id)).scalars())
        events = set(connection.execute(sa.select(outbox.c.event_id)).scalars())
    assert {f"{each}:placed" for each in ids} == events
    return ids


def run_api(home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "api.py"], cwd=ROOT, env=environment(home, **env), capture_output=True, text=True, timeout=120
    )


def test_a_port_that_is_taken_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_api(tmp_path / "home", SAISEI_API_PORT=port)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(rf"api: port {port} on 127\.0\.0\.1 cannot be had \(.*\); .* SAISEI_API_PORT\n", ended.stderr)


@pytest.mark.parametrize("port", ["http", "-1", "65536", "٣"])
def test_a_port_that_is_none_is_one_sentence_that_names_the_variable(port: str) -> None:
    with pytest.raises(InvalidInput, match=r"SAISEI_API_PORT: .* is not a port"):
        ApiSettings.from_env({"SAISEI_API_PORT": port})
    assert ApiSettings.from_env({}) == ApiSettings("127.0.0.1", 8080, 0.0)


def test_the_address_to_listen_at_is_one_of_digits(tmp_path: Path) -> None:
    for host in ("localhost", "::1", "127.0.0.1:8080", "127.1"):
        with pytest.raises(WrongSettings, match=r"SAISEI_API_HOST: .* is no IPv4 address"):
            ApiSettings.from_env({"SAISEI_API_HOST": host})
    with running(tmp_path / "home", SAISEI_API_HOST="127.0.0.2") as api:
        assert api.url.startswith("http://127.0.0.2:")
        assert api.client.get("/livez").status_code == 200


def test_a_kill_between_commit_and_answer_makes_the_same_request_a_known_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running(home, DYING.format(groups=1)) as dying:
        with pytest.raises(httpx.HTTPError):
            dying.place(order(1))
        assert dying.process.wait(60) == -signal.SIGKILL
    assert recorded(home) == {"order-1"}
    with running(home) as api:
        again = api.place(order(1))
        assert again.status_code == 200
        assert again.content == api.client.get("/orders/order-1").content
        problem(api.place(order(1, qty=2)), 409)
    assert recorded(home) == {"order-1"}


def test_groups_killed_between_commit_and_answer_are_each_order_once_when_the_callers_try_again(
    tmp_path: Path,
) -> None:
    """Twelve callers, and an API that dies after its fourth commit, then its seventh, its tenth, ..."""
    home = tmp_path / "home"
    wanted = [order(number) for number in range(1, 61)]
    answers: dict[str, list[int]] = {each["id"]: [] for each in wanted}
    groups = 4
    while left := [each for each in wanted if not answers[each["id"]]]:
        with running(home, DYING.format(groups=groups)) as dying:

            def caller(share: list[dict[str, object]], dying: Api = dying) -> None:
                with contextlib.suppress(httpx.TransportError):
                    for each in share:
                        answers[str(each["id"])].append(dying.place(each).status_code)

            threads = [threading.Thread(target=caller, args=[left[n::12]]) for n in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        groups += 3
        assert {each for each, codes in answers.items() if codes} <= recorded(home)
    assert {codes[0] for codes in answers.values()} == {200, 201}  # some were there before their first answer
    assert recorded(home) == set(answers)


def test_sigterm_under_load_finishes_what_runs_and_loses_no_acknowledged_order(tmp_path: Path) -> None:
    home = tmp_path / "home"
    acknowledged: set[str] = set()
    strange: list[str] = []
    with running(home) as api:

        def load(first: int) -> None:
            number = first
            with contextlib.suppress(httpx.TransportError):
                while True:
                    response = api.place(order(number))
                    if response.status_code == 201:
                        acknowledged.add(response.json()["id"])
                    else:
                        strange.append(response.text)
                    number += 1

        threads = [threading.Thread(target=load, args=[1 + 100_000 * n]) for n in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(acknowledged) >= 40, 60, "orders are acknowledged")
        assert api.stop() == 0
        for thread in threads:
            thread.join()
        assert "Traceback" not in api.log()
    assert strange == []
    assert acknowledged <= recorded(home)
    # At most the one order in flight of each caller may have missed its answer.
    assert len(recorded(home) - acknowledged) <= 8


def test_while_it_stops_it_says_that_it_is_not_ready_and_still_answers(tmp_path: Path) -> None:
    with running(tmp_path / "home", SAISEI_API_DRAIN="120") as api:
        assert api.client.get("/readyz").json()["ready"] is True
        api.process.send_signal(signal.SIGTERM)
        wait_until(lambda: api.client.get("/readyz").status_code == 503, 60, "it says so")
        document = problem(api.client.get("/readyz"), 503)
        assert (document["ready"], document["detail"]) == (False, "the API is stopping")
        assert document["checks"]["database"]["ok"]
        assert api.place(order(1)).status_code == 201
        assert api.stop() == 0  # told twice: at once


def test_a_write_lock_that_is_not_free_is_503_and_nothing_is_written(tmp_path: Path) -> None:
    with running(tmp_path / "home", SAISEI_BUSY="2") as api:
        lock = os.open(api.home / "saisei.db-writer", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = problem(api.place(order(1)), 503)
            assert document["type"] == "urn:saisei:problem:database-busy"
            # Many at once are told in a bounded time too: they do not wait for each other's waits, 48 s in all.
            answers: list[int] = []
            begun = time.monotonic()
            threads = [
                threading.Thread(target=lambda n=n: answers.append(api.place(order(n)).status_code))
                for n in range(2, 26)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert answers == [503] * 24
            assert time.monotonic() - begun < 30
            # Reads and health go on beside it.
            assert api.client.get("/status").json()["orders"] == 0
            assert api.client.get("/readyz").status_code == 200
        finally:
            os.close(lock)
        assert api.place(order(1)).status_code == 201
    assert recorded(api.home) == {"order-1"}


def test_a_database_that_does_not_answer_is_503_everywhere_and_the_process_lives(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with running(tmp_path / "home", DATABASE_URL=f"postgresql://nobody:secret@127.0.0.1:{port}/none") as api:
        problem(api.place(order(1)), 503)
        for path in ("/orders/order-1", "/sales", "/status"):
            problem(api.client.get(path), 503)
        document = problem(api.client.get("/readyz"), 503)
        assert document["checks"]["database"] == {"ok": False, "detail": "does not answer; no order can be taken"}
        assert api.client.get("/livez").status_code == 200
        problem(api.place({}), 422)
        assert api.stop() == 0
        assert "secret" not in api.log()


def test_a_database_that_comes_later_is_set_up_then(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "saisei.db").write_bytes(b"no database " * 500)
    with running(home) as api:
        problem(api.place(order(1)), 503)
        (home / "saisei.db").unlink()
        wait_until(lambda: api.place(order(1)).status_code == 201, 60, "it is set up")


def test_a_stopped_caller_cannot_hold_the_stop_up(tmp_path: Path) -> None:
    with running(tmp_path / "home") as api:
        host, port = api.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /orders HTTP/1.1\r\nhost: x\r\n")  # and no more
            assert api.client.get("/livez").status_code == 200
            assert api.stop() == 0


def test_answers_leave_at_once_since_the_listening_socket_names_its_protocol() -> None:
    # asyncio switches Nagle's delay off only then; with it each answer on a kept connection took 40 ms longer.
    with api_program._listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP

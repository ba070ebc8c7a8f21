"""`demo`: verdicts from real servers, new orders each time, nothing left unless it is to be kept."""

import asyncio
import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

import commands.demo
import embedded
import starter
from commands.context import Context
from contracts.errors import Unreachable
from intake import Intake
from labs import live
from labs.verdict import Verdict
from receivers.registry import RECEIVERS
from store.clock import now_ms
from store.control import initialize
from store.engine import Database, sqlite_url
from store.receivers import register_receiver
from tests.embedded.processes import processes_of
from tests.labs.running import start, start_program
from tests.labs.test_delivery import transcript
from tests.labs.test_outbox import counted
from tests.waiting import wait_until

# The walk-throughs cost their time in the other runs.
ONLY_LIVE = (
    "import sys, config, starter, commands.demo as d; d._WALKS = (); config.end(starter.main(['demo', *sys.argv[1:]]))"
)
DRAWN = re.compile("[\x1b\u2500-\u259f]")  # escapes, lines and blocks
LIVE = {"orders": 20, "events": 20, "deliveries": 60}


def test_it_judges_everything_on_a_fresh_home_and_ctrl_c_beside_it_leaves_nothing(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", "demo", "--json")
    ended = start_program(tmp_path / "ended", "-c", ONLY_LIVE)
    home = ended.folder / "home"
    wait_until(lambda: embedded.find(home), 60, "the live run's servers are up")
    ended.process.send_signal(signal.SIGINT)
    ended.process.communicate(timeout=120)
    assert ended.process.returncode in (0, 130)  # 0: it was quicker than the signal
    ended.nothing_left()

    document = json.loads(whole.finish()[0])
    assert [document[name] for name in ("delivery", "outbox", "recovery", "live")] == ["ok"] * 4
    assert document["counts"]["live"] == LIVE
    assert document["links"] == {}
    assert counted(whole.folder / "home" / "saisei.db", "SELECT count(*) FROM orders") == 20
    whole.nothing_left()


def test_kept_servers_are_linked_and_used_by_the_next_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    try:
        out, said = start(tmp_path, "demo", "--keep").finish()
        assert not DRAWN.search(out + said)  # what it prints goes into pipes here
        assert transcript() in out
        verdicts = dict(line.split()[:2] for line in out.split("\n\n")[-3].splitlines())
        assert verdicts == {"delivery": "ok", "outbox": "ok", "recovery": "ok", "live": "ok"}
        assert "live      orders 20  events 20  deliveries 60" in out
        assert "demo --keep" not in out
        stack = embedded.find(home)
        assert stack is not None
        assert f"{stack.ui_url}/namespaces/default/workflows/receiver%2Fbilling" in out
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{stack.ui_url}/namespaces/default/workflows", timeout=60) as page:
            assert page.status == 200
        assert "worker" in stack.pids

        document = json.loads(start_program(tmp_path, "-c", ONLY_LIVE, "--json").finish()[0])
        assert document["live"] == "ok"
        assert document["links"]["relay"] == f"{stack.ui_url}/namespaces/default/workflows/relay"
        assert counted(home / "saisei.db", "SELECT count(*) FROM orders") == 40
        assert embedded.find(home) is not None  # it was up before, so it stays
    finally:
        embedded.stop(home)
    wait_until(lambda: not processes_of(tmp_path), 60, f"no process below {tmp_path}")


def test_a_part_that_cannot_go_on_is_bad_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(context: Context) -> Verdict:
        raise Unreachable("there is no server")

    async def good(context: Context, *_: object) -> Verdict:
        return Verdict("live", "it went well")

    monkeypatch.setenv("SAISEI_HOME", str(tmp_path))
    monkeypatch.setattr(commands.demo, "_WALKS", (("delivery", broken),))
    monkeypatch.setattr(commands.demo, "_live", good)
    assert starter.main(["demo", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["delivery"], document["live"]) == ("bad", "ok")
    assert document["reasons"] == {"delivery": "there is no server", "live": "it went well"}


def test_a_server_that_is_configured_and_away_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAISEI_HOME", str(tmp_path))
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(commands.demo, "_WALKS", ())
    assert starter.main(["demo"]) == 1
    assert "live      bad  Temporal at 127.0.0.1:1 does not answer; " in capsys.readouterr().out
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    assert starter.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reasons"]["live"].startswith("Redis at 127.0.0.1:1 does not answer")
    assert not (tmp_path / "run").exists()


def test_a_pipeline_that_stands_still_is_bad_in_time_and_the_sentence_names_what_is_missing(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "live.db"))
    with database.write() as connection:
        initialize(connection, now_ms())
        for receiver in RECEIVERS:
            register_receiver(connection, receiver.name, receiver.event_types)

    async def nobody() -> None:
        raise RuntimeError("there is no Temporal")

    seen: list[tuple[int, int]] = []
    verdict = asyncio.run(
        live.run(database, Intake(database, nobody), 5, lambda done, all_: seen.append((done, all_)), patience=0.1)
    )
    database.close()
    assert seen[-1] == (0, 15)
    assert verdict.word == "bad"
    assert verdict.sentence == (
        "after 0.1 s the relay has 5 events left and billing lacks 5 of 5 (not registered) and "
        "mail lacks 5 of 5 (not registered) and sales lacks 5 of 5 (not registered)"
    )


def test_orders_of_two_runs_in_one_second_differ() -> None:
    assert len({order.id for _ in range(50) for order in live.new_orders(20)}) == 1000

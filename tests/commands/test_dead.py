"""`dead list`, `dead redrive`, `dead waive`: without Temporal, and with a worker."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands.dead import since
from embedded import TemporalServer, ValkeyServer
from embedded.tied import tie
from receivers.registry import RECEIVERS
from starter import main
from store.clock import now_ms
from store.engine import Database
from store.receivers import register_receiver
from tests.servers import fresh_namespace
from tests.store.scenes import place, publish, rows, spread
from tests.store.test_dead_letters import kill
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Shop:
    """Twenty orders of which eight died at `sales` and one at `mail`, and the command line on them."""

    database: Database
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> Done:
        """In this process: a start of Python for each command takes longer than the command."""
        self.capsys.readouterr()
        piping = signal.getsignal(signal.SIGPIPE)
        try:
            code = main(arguments)
        except SystemExit as usage:
            code = int(usage.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, piping)  # the command's own, not this process's
        printed = self.capsys.readouterr()
        return Done(code, printed.out, printed.err)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, *arguments: str, code: int = 1) -> str:
        """The one sentence that it ended with."""
        done = self.run(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr.strip()


@pytest.fixture
def shop(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Shop]:
    database = Database(sqlite_url)
    with database.write() as connection:
        for receiver in RECEIVERS:
            register_receiver(connection, receiver.name, receiver.event_types)
    place(database, *range(1, 21))
    spread(database, *publish(database))
    now = now_ms()
    dead = [f"order-{number}:placed" for number in range(13, 21)]
    kill(database, "sales", *dead, error="DrillFailure: sales was told to fail [now]", now=now - 60_000)
    kill(database, "mail", "order-3:placed", error="ValueError: no address of order-3", now=now - 7_200_000)
    for name in [name for name in os.environ if name.startswith(("TEMPORAL_", "SAISEI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATABASE_URL", database.url.render_as_string())
    monkeypatch.setenv("SAISEI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    yield Shop(database, monkeypatch, capsys)
    database.close()


def _dead(shop: Shop) -> int:
    return int(rows(shop.database, "SELECT count(*) FROM deliveries WHERE status = 'dead'")[0][0])


def test_the_list_begins_with_the_totals(shop: Shop) -> None:
    done = shop.run("dead", "list", "--limit", "2")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (0, "9 dead letters: mail 1, sales 8")
    assert lines[3] == "8      sales     DrillFailure  DrillFailure: sales was told to fail [now]"
    assert [line.split()[:2] for line in lines[-2:]] == [["mail", "order-3:placed"], ["sales", "order-13:placed"]]
    assert done.stderr == "7 more; narrow it with a filter, or raise --limit\n"
    document = shop.json("dead", "list", "--since", "1h", "--event", "order-14")
    assert (document["count"], document["by_receiver"][0]["receiver"]) == (1, "sales")
    assert document["by_error"][0]["error"] == "DrillFailure"
    (letter,) = document["dead"]
    assert (letter["event_id"], letter["aggregate_id"], letter["attempts"], letter["waiting_behind"]) == (
        "order-14:placed",
        "order/order-14",
        5,
        0,
    )
    assert shop.run("dead", "list", "--event", "order-14").stdout.startswith("1 dead letter: sales 1\n")
    assert "there is no receiver shop" in shop.refused("dead", "list", "--receiver", "shop")


def test_a_redrive_of_everything_must_be_meant(shop: Shop) -> None:
    assert "say --all" in shop.refused("dead", "redrive", code=2)
    assert "--all goes with no filter" in shop.refused("dead", "redrive", "--all", "--receiver", "mail", code=2)
    assert "'soon' is no time" in shop.refused("dead", "redrive", "--since", "soon", code=2)
    document = shop.json("dead", "redrive", "--dry-run")
    assert (document["dry_run"], document["count"]) == (True, 9)
    assert [(each["receiver"], each["error"], each["count"]) for each in document["by_error"]] == [
        ("sales", "DrillFailure", 8),
        ("mail", "ValueError", 1),
    ]
    assert (_dead(shop), rows(shop.database, "SELECT count(*) FROM redrives")) == (9, [(0,)])


def test_without_temporal_a_redrive_and_a_waiver_are_recorded(shop: Shop) -> None:
    done = shop.run("dead", "redrive", "--receiver", "sales", "--request", "night")
    assert done.returncode == 0
    assert done.stdout == "redrive night RUNNING: 0 of 8 pending again, 0 skipped\n"
    assert done.stderr.splitlines() == [
        "redrive night: 8 dead letters",
        "nothing is lost, it goes on once Temporal is back: Temporal at 127.0.0.1:1 does not answer; start it, or "
        "correct or unset TEMPORAL_ADDRESS (`make up` starts one then)",
    ]
    again = shop.json("dead", "redrive", "--receiver", "sales", "--request", "night")
    assert (again["created"], again["total"], again["filters"]) == (False, 8, {"receiver": "sales"})
    sentence = shop.refused("dead", "redrive", "--request", "night", "--all")
    assert sentence.startswith("starter.py: redrive night was asked for at")
    assert "with --receiver sales" in sentence

    waiving = ("dead", "waive", "order-3", "--receiver", "mail", "--reason")
    first = shop.json(*waiving, "no [address]")
    assert (first["event_id"], first["reason"], first["created"]) == ("order-3:placed", "no [address]", True)
    second = shop.json(*waiving, "no [address]")
    assert (second["created"], second["waived_at"]) == (False, first["waived_at"])
    assert "nothing was changed" in shop.refused(*waiving, "another reason")
    refused = shop.refused("dead", "redrive", "--event", "order-3", "--dry-run")
    assert refused.endswith("no [address]; a waived event is not redriven")
    assert "it has not failed" in shop.refused("dead", "waive", "order-1", "--receiver", "mail", "--reason", "x")
    assert "reason" in shop.refused(*waiving, " ")
    assert shop.run("dead", "list", "--waived").stdout.splitlines()[-1].split()[:2] == ["mail", "order-3:placed"]


def test_with_a_worker_it_waits_until_all_are_pending_again_and_they_are_delivered(
    shop: Shop,
    temporal_server: TemporalServer,
    valkey_server: ValkeyServer,
) -> None:
    client = asyncio.run(fresh_namespace(temporal_server))
    shop.monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_server.address)
    shop.monkeypatch.setenv("TEMPORAL_NAMESPACE", client.namespace)
    shop.monkeypatch.setenv("REDIS_URL", valkey_server.url)
    with tie(subprocess.Popen([sys.executable, "worker.py"], cwd=ROOT, stderr=subprocess.DEVNULL)) as worker:
        try:
            document = shop.json("dead", "redrive", "--receiver", "sales")
            assert (document["state"], document["total"], document["taken"], document["created"]) == (
                "COMPLETED",
                8,
                8,
                True,
            )
            again = shop.run("dead", "redrive", "--receiver", "sales", "--request", document["request"])
            assert again.stdout == f"redrive {document['request']} COMPLETED: 8 of 8 pending again, 0 skipped\n"
            assert "nothing is done twice" in again.stderr
            shop.run("dead", "waive", "order-3", "--receiver", "mail", "--reason", "no address")
            states = "SELECT receiver, status, count(*) FROM deliveries GROUP BY 1, 2 ORDER BY 1, 2"
            expected = [("billing", "done", 20), ("mail", "done", 19), ("mail", "waived", 1), ("sales", "done", 20)]
            wait_until(lambda: rows(shop.database, states) == expected, 60, "all is delivered or waived")
            assert rows(shop.database, "SELECT orders, amount FROM sales_totals") == [(20, 21_000)]
            none = shop.run("dead", "redrive", "--all")
            assert (none.returncode, none.stdout.split(": ")[1]) == (0, "0 of 0 pending again, 0 skipped\n")
        finally:
            worker.kill()


def test_since_takes_durations_and_iso_times() -> None:
    for text, ago in (("30m", 1_800_000), ("2h", 7_200_000), ("1d12h", 129_600_000), ("45s", 45_000)):
        moment, said = since(text)
        assert (abs(now_ms() - ago - moment) < 5_000, said) == (True, text)
    assert since("2026-01-01T00:00:00Z") == (1_767_225_600_000, None)
    assert since("2026-01-01T09:00:00+09:00") == since("2026-01-01") == (1_767_225_600_000, None)
    assert since("99999999d") == (0, "99999999d")
    assert since(f"{'9' * 400}d") == (0, f"{'9' * 400}d")
    for text in ("", "h", "2 h", "-2h", "2w", "soon", "2999-01-01", "٣h", "1h1h", "1m1h"):
        with pytest.raises(Exception, match=r"is no time|is in the future"):
            since(text)

"""`check` ends with 0 when everything that work needs answers, and with 1 and one sentence when something is away."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import embedded
from commands.stack import worker_child
from contracts import search
from tests.commands.cli import Cli
from tests.commands.conftest import Inside
from tests.waiting import wait_until


@pytest.fixture
def without_worker(tmp_path: Path) -> Iterator[Cli]:
    with embedded.start(tmp_path / "home", search_attributes=search.START_DEV, headless=True) as stack:
        yield Cli(stack.home)


def test_all_is_well(cli: Cli) -> None:
    # It answers within three seconds, but perhaps not while it starts and the machine is busy.
    wait_until(lambda: cli("check").exit_code == 0, 60, "all answer")
    assert cli("check").lines == ["database, Redis, Temporal and a worker answer"]
    document = cli.json("check")
    assert document == {name: {"ok": True, "detail": "answers"} for name in ("database", "redis", "temporal", "worker")}


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        (
            {"DATABASE_URL": "postgresql://u:secret@127.0.0.1:1/x"},
            "database",
            "the database postgresql://u:***@127.0.0.1",
        ),
        ({"REDIS_URL": "redis://127.0.0.1:1"}, "redis", "Redis at 127.0.0.1:1 does not answer"),
        ({"TEMPORAL_ADDRESS": "127.0.0.1:1"}, "temporal", "Temporal at 127.0.0.1:1 does not answer"),
    ],
)
def test_each_server_that_is_away_is_named(
    cli: Cli, inside: Inside, env: dict[str, str], name: str, words: str
) -> None:
    away = inside(cli, "check", env=env)
    away.refused(words)
    assert away.stderr.count("does not answer") == 1

    def wrong() -> set[str]:
        document = inside(cli, "check", "--json", env=env)
        assert document.exit_code == 1
        return {each for each, check in document.json.items() if not check["ok"]}

    expected = {name, *(["worker"] if name == "temporal" else [])}
    wait_until(lambda: wrong() == expected, 60, "it alone is named")


def test_all_that_is_away_is_named_in_one_sentence(nothing: Cli) -> None:
    nothing("check").refused("there is no database", "no Redis server", "no Temporal server")
    nothing("check", env={"REDIS_URL": "nonsense"}).refused("REDIS_URL", code=2)


def test_servers_without_a_worker_are_not_enough(without_worker: Cli) -> None:
    assert without_worker("init").exit_code == 0
    without_worker("check").refused("no worker asks for work on saisei and saisei-drain; start one with")


def test_a_worker_that_hangs_does_not_answer(tmp_path: Path) -> None:
    with embedded.start(
        tmp_path / "home", children=[worker_child()], search_attributes=search.START_DEV, headless=True
    ) as stack:
        cli = Cli(stack.home)
        wait_until(lambda: cli("check").exit_code == 0, 60, "the worker answers")
        os.kill(stack.pids["worker"], signal.SIGSTOP)
        try:
            cli("check").refused("a worker asks for work and does not answer")
        finally:
            os.kill(stack.pids["worker"], signal.SIGCONT)
        wait_until(lambda: cli("check").exit_code == 0, 60, "it answers again")

"""What is missing, unreachable or broken gets one sentence, and nothing else."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis

from embedded import EmbeddedError, Stack
from store.fairlock import FairLock
from tests.commands.cli import ROOT, STARTER, Cli
from tests.commands.conftest import Inside


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home with a database, and no server."""
    cli = Cli(tmp_path_factory.mktemp("lonely"))
    made = cli("init")
    assert made.exit_code == 0
    assert made.lines[0].startswith("database: set up (")
    assert made.lines[0].endswith("tables, receivers billing, mail, sales)")
    assert made.stderr.startswith("search attributes are registered by the worker's start: no Temporal server")
    return cli


def test_without_a_database_init_is_named(nothing: Cli) -> None:
    nothing("status").refused(f"there is no database {nothing.home / 'saisei.db'}; `starter.py init` makes one")
    nothing.home.mkdir()
    (nothing.home / "saisei.db").touch()
    nothing("status").refused("the database is not set up; run `starter.py init`")


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("audit",),
        ("check",),
        ("queues",),
        ("orders", "place"),
        ("orders", "show", "order-1"),
        ("event", "publish", "order-1"),
        ("dead", "list"),
        ("receivers", "list"),
        ("generations", "list"),
        ("execution",),
        ("intake", "pause"),
        ("job", "run", "job-1"),
        ("fault", "off"),
        ("recover-outbox",),
    ],
    ids=" ".join,
)
def test_a_path_at_which_there_is_no_database_is_named_and_nothing_is_made_there(
    inside: Inside, nothing: Cli, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    mistyped = tmp_path / "mistyped" / "saisie.db"
    env = {"DATABASE_URL": f"sqlite:///{mistyped}", "REDIS_URL": "redis://127.0.0.1:1"}
    words = "Redis at 127.0.0.1:1" if arguments == ("recover-outbox",) else f"there is no database {mistyped}; "
    inside(nothing, *arguments, env=env).refused(words)
    assert not mistyped.parent.exists()
    assert not nothing.home.exists()


def test_init_names_what_it_adds_to_a_database_that_was_set_up(nothing: Cli) -> None:
    assert nothing("init").exit_code == 0
    assert nothing("init").lines[0].startswith("database: unchanged (")
    with closing(sqlite3.connect(nothing.home / "saisei.db")) as connection, connection:
        connection.execute("DELETE FROM receivers WHERE receiver = 'mail'")
        connection.execute("DROP TABLE shipments")
    assert nothing("init").lines[0].startswith("database: added receivers mail, table shipments (")


def test_orders_are_recorded_while_no_server_runs(lonely: Cli) -> None:
    result = lonely("orders", "place", "--count", "2")
    assert (result.exit_code, result.lines) == (0, ["2 orders placed"])
    why = "no Temporal server is running here; start one with `make up`, or set TEMPORAL_ADDRESS"
    assert result.stderr == f"nothing is lost, it goes on once Temporal is back: {why}\n"
    published = lonely("event", "publish", "order-1")
    assert (published.exit_code, published.stderr) == (0, result.stderr)
    status = lonely.json("status")
    assert status["outbox"] == {"pending": 2, "in_flight": 0, "fanned_out": 0}
    assert status["worker"].startswith("unknown: no Temporal server is running here")
    lonely("event", "deliver", "mail", "order-1").refused("there is no delivery of order-1:placed to mail yet")


def test_every_command_says_in_the_same_words_that_temporal_is_away(inside: Inside, tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    assert inside(cli, "init").exit_code == 0
    with closing(sqlite3.connect(cli.home / "saisei.db")) as connection, connection:
        connection.execute("INSERT INTO receivers (receiver) VALUES ('post')")
    assert inside(cli, "fault", "on").exit_code == 0
    said = {
        words: inside(cli, *words.split()).stderr.splitlines()[-1].removeprefix("starter.py: ")
        for words in (
            "orders place",
            "event publish order-1",
            "fault off",
            "job run job-1",
            "job run job-1 --no-wait",
            "receivers end post --reason moved",
        )
    }
    assert set(said.values()) == {
        "nothing is lost, it goes on once Temporal is back: no Temporal server is running here; start one with "
        "`make up`, or set TEMPORAL_ADDRESS"
    }, said


def test_a_home_that_is_not_there_is_no_home_on_which_nothing_runs(nothing: Cli) -> None:
    mistyped = f"there is no home {nothing.home}, so nothing was stopped; name the right one by SAISEI_HOME"
    nothing("down").refused(mistyped)
    assert not nothing.home.exists()
    nothing.home.mkdir()
    assert (nothing("down").exit_code, nothing("down").lines) == (0, ["nothing is running here"])


def test_servers_that_are_not_there_are_named(lonely: Cli, inside: Inside) -> None:
    inside(lonely, "queues").refused("no Redis server is running here; start one with `make up`, or set REDIS_URL")
    inside(lonely, "links").refused("there is no Web UI here; start one with `make up`, or set TEMPORAL_UI_URL")
    inside(lonely, "job", "run", "j", "--ship-fails").refused("no Temporal server is running here")
    assert inside(lonely, "down").lines == ["nothing is running here"]


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["queues"], {"REDIS_URL": "no-url"}, ["REDIS_URL: must begin with redis://"]),
        (["status"], {"REDIS_URL": "nonsense:secret"}, ["REDIS_URL: must begin with redis://"]),
        (["status"], {"REDIS_URL": "redis://u:secret@127.0.0.1:port"}, ["REDIS_URL: "]),
        (["init"], {"TEMPORAL_ADDRESS": "no address"}, ["TEMPORAL_ADDRESS: no address is not host:port"]),
        (["status"], {"TEMPORAL_PROFILE": "none"}, ["profile", "cannot be read"]),
        (["status"], {"DATABASE_URL": "no-url"}, ["DATABASE_URL: is not a database URL"]),
        (["status"], {"DATABASE_URL": "postgresql://127.0.0.1:port/x"}, ["DATABASE_URL: is not a database URL"]),
        (["status"], {"SAISEI_IDLE": "soon"}, ["SAISEI_IDLE: 'soon' is not a positive number"]),
        (["status"], {"SAISEI_HEARTBEAT": "1"}, ["SAISEI_HEARTBEAT: must exceed twice SAISEI_BUSY"]),
    ],
)
def test_a_bad_setting_is_named_and_is_wrong_usage(
    inside: Inside, lonely: Cli, arguments: list[str], env: dict[str, str], words: list[str]
) -> None:
    result = inside(lonely, *arguments, env=env)
    result.refused(*words, code=2)
    assert "secret" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["queues"], {"REDIS_URL": "redis://127.0.0.1:1"}, ["Redis at 127.0.0.1:1 does not answer"]),
        (["up"], {"REDIS_URL": "redis://127.0.0.1:1"}, ["Redis at 127.0.0.1:1 does not answer"]),
        (["up"], {"TEMPORAL_ADDRESS": "127.0.0.1:1"}, ["Temporal at 127.0.0.1:1 does not answer"]),
        (["status"], {"DATABASE_URL": "postgresql://u:secret@127.0.0.1:1/x"}, ["u:***@127.0.0.1", "does not answer"]),
    ],
)
def test_a_configured_server_that_does_not_answer_is_named(
    inside: Inside, lonely: Cli, arguments: list[str], env: dict[str, str], words: list[str]
) -> None:
    result = inside(lonely, *arguments, env=env)
    result.refused(*words)
    assert "secret" not in result.stderr


def test_status_shows_what_the_database_knows_while_the_other_servers_are_away(lonely: Cli) -> None:
    away = {"REDIS_URL": "redis://127.0.0.1:1", "TEMPORAL_ADDRESS": "127.0.0.1:1"}
    status = lonely.json("status", env=away)
    assert status["redis"].startswith("unknown: Redis at 127.0.0.1:1 does not answer")
    assert status["worker"].startswith("unknown: Temporal at 127.0.0.1:1 does not answer")
    assert set(status["receivers"]) == {"billing", "mail", "sales"}


TWO_NAMES = """
import sys
from config import end
from receivers import registry
from receivers.builtin import Mail
class Post(Mail):
    pass
registry.RECEIVERS = (*registry.RECEIVERS, Post())
registry.by_name.__defaults__ = (registry.RECEIVERS,)
import {module}
sys.argv = ["{module}.py", *{arguments}]
end({module}.main())
"""


@pytest.mark.parametrize(("module", "arguments"), [("starter", ["init"]), ("worker", []), ("api", [])])
def test_two_receivers_of_one_name_are_both_named_and_nothing_is_begun(
    nothing: Cli, module: str, arguments: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_NAMES.format(module=module, arguments=arguments)],
        cwd=ROOT,
        env=nothing.environment({"SAISEI_API_PORT": "0"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"{module}(\.py)?: receivers/registry\.py: two receivers are named mail: Mail of receivers\.builtin and "
        r"Post of __main__; give one of them another name\n",
        done.stderr,
    )


def test_a_file_that_is_no_database_is_named(nothing: Cli, tmp_path: Path) -> None:
    junk = tmp_path / "junk.db"
    junk.write_bytes(b"no database at all" * 1000)
    nothing("init", env={"DATABASE_URL": f"sqlite:///{junk}"}).refused("file is not a database")


@pytest.mark.parametrize("command", ["init", "up"])
def test_a_home_that_cannot_be_written_is_named(inside: Inside, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    inside(Cli(tmp_path / "file" / "home"), command).refused("cannot be written", "SAISEI_HOME")


def test_a_database_that_somebody_else_writes_for_long_is_named(lonely: Cli, inside: Inside) -> None:
    lock = FairLock(str(lonely.home / "saisei.db"), 1.0)
    with lock.held():
        inside(lonely, "orders", "place", env={"SAISEI_BUSY": "0.2"}).refused("write lock was not free for 0.2 s")
    lock.close()


def test_orders_by_the_dozen_are_placed_without_a_bar_where_nobody_would_see_it_move(lonely: Cli) -> None:
    result = lonely("orders", "place", "--start", "101", "--count", "40")
    assert (result.exit_code, result.stdout) == (0, "40 orders placed\n")
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_orders_before_the_one_that_was_refused_are_told(lonely: Cli, inside: Inside) -> None:
    other = ["--id", "order-12", "--sku", "tea", "--amount", "1"]
    assert inside(lonely, "orders", "place", *other).exit_code == 0
    result = inside(lonely, "orders", "place", "--start", "11", "--count", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "recorded: at least 1 of 2 orders" in result.stderr
    assert "order order-12 was placed before with other content" in result.stderr


def test_a_key_of_another_type_is_named(lonely: Cli, stack: Stack) -> None:
    url = f"{str(stack.redis_url).rpartition('/')[0]}/7"
    with redis.Redis.from_url(url) as client:
        client.set("outbox.events", "no list")
    lonely("queues", env={"REDIS_URL": url}).refused("holds another type; remove or rename `outbox.events`")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_told(lonely: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(STARTER), "status", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=lonely.environment(None),
        )
    assert (done.returncode, done.stderr) == (1, "starter.py: No space left on device\n")


def test_a_worker_that_cannot_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    from commands.stack import _own_words

    log = tmp_path / "logs" / "worker.log"
    log.parent.mkdir()
    log.write_text("2026 INFO starting\nworker: SAISEI_IDLE: 'x' is not a positive number\n")
    error = EmbeddedError("worker ended with exit code 1 before it was ready: ...")
    assert str(_own_words(tmp_path, error)) == ("the worker cannot start: SAISEI_IDLE: 'x' is not a positive number")
    other = EmbeddedError("valkey ended with exit code 1")
    assert _own_words(tmp_path, other) is other


def test_a_registry_that_cannot_be_loaded_does_not_keep_down_from_working(tmp_path: Path) -> None:
    """Who breaks it while a stack runs could not stop the stack."""
    program = "import sys; sys.modules['receivers.registry'] = None; import config, starter; config.end(starter.main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "down"],
        cwd=ROOT,
        env={**os.environ, "SAISEI_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing is running here\n", "")

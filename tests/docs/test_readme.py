"""README's commands print what it quotes, run in its order on one stack, and its receiver takes events."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import embedded
from contracts.orders import Order
from pipeline.failure import RetryPolicy
from pipeline.receiving import ReceiverStage
from pipeline.writer import Writer
from receivers.base import Receiver
from store.clock import now_ms
from store.control import initialize
from store.deliveries import DEAD, DONE, deliveries_of
from store.engine import Database, sqlite_url
from store.fanout import fan_out
from store.orders import place_order
from store.receivers import register_receiver
from store.schema import metadata
from tests.commands.cli import STARTER, Cli
from tests.docs.pages import ROOT, agrees, blocks, commands
from tests.waiting import wait_until

# What changes nothing is asked again until it prints what is quoted: a person takes longer to type it.
READING = re.compile(r"starter\.py (status|dead list|audit|generations list|links)\b|curl (?!.* -d )")
RECIPE = re.compile(r"^(up|down): .*\n\t@\$\(RUN\) starter\.py (.*)$", re.MULTILINE)


class Shell:
    """Runs what stands behind a prompt of README on one home."""

    def __init__(self, home: Path) -> None:
        self.cli = Cli(home)
        # What takes a quarter of a minute in README takes a second here.
        self.env = self.cli.environment({"SAISEI_BACKOFF": "0.05"})
        self.recipes = dict(RECIPE.findall((ROOT / "Makefile").read_text()))

    def run(self, command: str) -> list[str]:
        """The lines that it prints, to stdout or stderr."""
        program, *arguments = shlex.split(command)
        if program == "make":
            program, arguments = "starter.py", shlex.split(self.recipes[arguments[0]])
        if program == "starter.py":
            arguments = [sys.executable, str(STARTER), *arguments]
        else:
            arguments = [program, *(self._here(word) for word in arguments)]
        done = subprocess.run(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=self.env, cwd=ROOT
        )
        return done.stdout.splitlines()

    def at_rest(self) -> bool:
        """Whether no delivery waits."""
        receivers = self.cli.json("status")["receivers"].values()
        return all(each["pending"] + each["retrying"] + each["held"] == 0 for each in receivers)

    def _here(self, word: str) -> str:
        stack = embedded.find(self.cli.home)
        assert stack is not None
        return word.replace("http://127.0.0.1:8080", str(stack.url("api")))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "home")
    yield shell
    embedded.stop(shell.cli.home)


@pytest.mark.timeout(600)
def test_the_commands_print_what_is_quoted(shell: Shell) -> None:
    quoted = [each for block in blocks("run") for each in commands(block)]
    assert len(quoted) > 20
    for each in quoted:
        if each.command.startswith("curl") and shutil.which("curl") is None:
            continue
        if each.command.startswith("starter.py fault on"):
            wait_until(shell.at_rest, 60, "what was placed before is delivered")
        printed = shell.run(each.command)
        if READING.match(each.command):
            printed = wait_until_quoted(shell, each.command, each.output, printed)
        assert agrees(each.output, printed), "\n".join([each.command, *printed, "is quoted as", *each.output])


def wait_until_quoted(shell: Shell, command: str, quoted: list[str], printed: list[str]) -> list[str]:
    """What it prints once that is what is quoted, or what it printed last."""
    tries = 60
    while not agrees(quoted, printed) and tries:
        tries -= 1
        printed = shell.run(command)
    return printed


@pytest.fixture
def example() -> Iterator[Receiver]:
    """The receiver that README shows how to write."""
    (block,) = blocks("run: receiver")
    names: dict[str, object] = {"__name__": "receivers.stock"}
    exec(compile(block, "README.md", "exec"), names)
    table = names["stock_moves"]
    assert isinstance(table, sa.Table)
    try:
        yield names["Stock"]()  # type: ignore[operator]
    finally:
        metadata.remove(table)  # of all tests in this process


@pytest.mark.anyio
async def test_the_receiver_takes_events(example: Receiver, tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "example.db"))
    with database.write() as connection:
        initialize(connection, now_ms())
        register_receiver(connection, example.name, example.event_types)
        for name, sku in (("a", "tea"), ("b", "gift-card")):
            place_order(connection, Order(name, sku, 2, 100, "JPY"), now_ms())
        fan_out(connection, [b"a:placed", b"b:placed", b"a:placed"], now_ms())

    async def start_run(*_: str) -> None:
        raise AssertionError("a rejected event is not retried")

    writer = Writer(database)
    stage = ReceiverStage(example, writer, retry=RetryPolicy(5, 1.0), start_run=start_run, run_grace=12.0)
    assert [await stage.step(), await stage.step()] == [2, 0]
    writer.close()
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT sku, qty FROM stock_moves").all() == [("tea", -2)]
        states = {event: deliveries_of(connection, event)[0].status for event in ("a:placed", "b:placed")}
    assert states == {"a:placed": DONE, "b:placed": DEAD}
    database.close()

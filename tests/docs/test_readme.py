"""README's commands print what it quotes, run in its order on one stack, and its receiver takes events."""

import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import embedded
from tests.commands.cli import STARTER, Cli
from tests.docs.pages import ROOT, Quoted, agrees, blocks, commands
from tests.waiting import wait_until

# What changes nothing is asked again until it prints what is quoted: a person takes longer to type it.
READING = re.compile(r"starter\.py (status|dead list|audit|generations list|links)\b|curl (?!.* -d )")
RECIPE = re.compile(r"^(up|down): .*\n\t@\$\(RUN\) starter\.py (.*)$", re.MULTILINE)


class Shell:
    """Runs what stands behind a prompt of README on one home."""

    def __init__(self, home: Path, root: Path = ROOT) -> None:
        self.cli = Cli(home)
        self.root = root
        # What takes a quarter of a minute in README takes a second here.
        self.env = self.cli.environment({"SAISEI_BACKOFF": "0.05"})
        self.recipes = dict(RECIPE.findall((ROOT / "Makefile").read_text()))

    def run(self, command: str) -> list[str]:
        """The lines that it prints, to stdout or stderr."""
        program, *arguments = shlex.split(command)
        if program == "make":
            program, arguments = "starter.py", shlex.split(self.recipes[arguments[0]])
        if program == "starter.py":
            arguments = [sys.executable, str(self.root / STARTER.name), *arguments]
        else:
            arguments = [program, *(self._here(word) for word in arguments)]
        done = subprocess.run(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            env=self.env,
            cwd=self.root,
        )
        return done.stdout.splitlines()

    def follow(self, block: str) -> list[Quoted]:
        """Run a block's commands; each must print what is quoted."""
        quoted = list(commands(block))
        for each in quoted:
            if each.command.startswith("curl") and shutil.which("curl") is None:
                continue
            if each.command.startswith("starter.py fault on"):
                wait_until(self.at_rest, 60, "what was placed before is delivered")
            printed = self.run(each.command)
            if READING.match(each.command):
                printed = self._until_quoted(each, printed)
            assert agrees(each.output, printed), "\n".join([each.command, *printed, "is quoted as", *each.output])
        return quoted

    def _until_quoted(self, quoted: Quoted, printed: list[str]) -> list[str]:
        """What it prints once that is what is quoted, or what it printed last."""
        tries = 60
        while not agrees(quoted.output, printed) and tries:
            tries -= 1
            printed = self.run(quoted.command)
        return printed

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
    assert len([each for block in blocks("run") for each in shell.follow(block)]) > 20


def changed(text: str, diff: str) -> str:
    """The text with a change of README, whose lines stand there once."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
    assert text.count(before) == 1
    return text.replace(before, after)


def test_a_receiver_that_is_added_as_it_is_told_takes_events(tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "tests", "docs", "__pycache__"))
    shell = Shell(tmp_path / "home", root)
    try:
        assert shell.run("make up")[0].startswith("starting ")
        (module,) = blocks("file: receivers/stock.py")
        (root / "receivers" / "stock.py").write_text(module)
        registry = root / "receivers" / "registry.py"
        (change,) = blocks("change: receivers/registry.py")
        registry.write_text(changed(registry.read_text(), change))
        (block,) = blocks("run: receiver")
        assert len(shell.follow(block)) == 6
        with sqlite3.connect(shell.cli.home / "saisei.db") as connection:
            assert connection.execute("SELECT sku, qty FROM stock_moves").fetchall() == [("tea", -2)]
    finally:
        embedded.stop(shell.cli.home)

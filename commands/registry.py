"""The words of the command line: what each is for, and the module that knows it.

A module is imported when its word is said: all of them together take most of a second, and `--help` needs none.
"""

import argparse
import importlib
from dataclasses import dataclass

from commands.parsing import Commands, Parser


@dataclass(frozen=True)
class Word:
    """`module` of this package adds the command, or group of commands, of this name."""

    name: str
    module: str
    summary: str


WORDS = {
    word.name: word
    for word in (
        Word("up", "stack", "start the servers, the worker and the HTTP API in the background"),
        Word("down", "stack", "stop what `up` started; the data stays"),
        Word(
            "init",
            "database",
            "make what is missing: tables, control row, receivers, and search attributes where Temporal answers",
        ),
        Word("orders", "orders", "place and show orders"),
        Word("job", "jobs", "run and show charge -> ship jobs"),
        Word("event", "events", "publish, show, deliver and duplicate events"),
        Word("dead", "dead", "dead letters: events that a receiver could not take"),
        Word("receivers", "receivers", "who takes which events, and ending one that takes none any more"),
        Word("status", "status", "show what there is and where it stands"),
        Word("check", "check", "tell whether database, Redis, Temporal and a worker answer; exit code 1 when not"),
        Word("queues", "queues", "show what waits in Redis and at each receiver"),
        Word("links", "links", "print links into the Temporal Web UI"),
        Word("read-api", "api", "print the totals that the HTTP API serves"),
        Word(
            "audit",
            "audit",
            "check that no event is lost, no effect is double and the totals are right; exit code 1 names what is not",
        ),
        Word("intake", "intake", "take no new orders, or take them again"),
        Word(
            "rebuild",
            "rebuilds",
            "rebuild the sales totals from the whole history, prove them equal, and switch to them, with intake paused",
        ),
        Word("execution", "rebuilds", "show the rebuild or rollback that runs, or else the last one"),
        Word("generations", "rebuilds", "the copies of the sales totals"),
        Word(
            "recover-outbox",
            "recover",
            "send what Redis lost again, now rather than after the worker's 30 seconds; what waits there is left alone",
        ),
        Word("fault", "faults", "drill switches: a receiver that fails, or is away"),
        Word("lab", "labs", "walk-throughs on servers of their own; they touch no live data"),
        Word("demo", "demo", "run the walk-throughs and a small live run, and print a verdict for each"),
    )
}


def add_words(top: Parser, said: str | None = None) -> None:
    """Declare all commands, or only those of the word that was `said`, and a line of help for each of the others."""
    subparsers: argparse._SubParsersAction[Parser] = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND"
    )
    commands = Commands(subparsers, {word.name: word.summary for word in WORDS.values()})
    wanted = set(WORDS) if said is None else {said}
    modules = {word.module for word in WORDS.values() if word.name in wanted}
    for word in WORDS.values():
        if word.module not in modules:
            commands.mention(word.name)
        elif word.name not in subparsers.choices:
            importlib.import_module(f"commands.{word.module}").add(commands)

"""Every command has help with an example, and every example is a command."""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator

import pytest

from commands.parsing import Parser
from starter import parser
from tests.commands.cli import Cli
from tests.commands.conftest import Inside


def all_commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from all_commands(child)
            return
    yield of


def examples(of: argparse.ArgumentParser) -> list[str]:
    return [line.strip() for line in (of.epilog or "").splitlines()[1:]]


@pytest.mark.parametrize("command", list(all_commands(parser())), ids=lambda command: command.prog)
def test_a_command_has_examples_that_parse_and_takes_json(command: argparse.ArgumentParser) -> None:
    assert examples(command)
    for example in examples(command):
        program, *arguments = shlex.split(example)
        assert f"{program} {' '.join(arguments)}".startswith(command.prog)
        parsed = parser().parse_args([*arguments, *([] if "--json" in arguments else ["--json"])])
        assert parsed.json is True
        assert callable(parsed.run)
        # As a person says it, only the module of the first word is imported.
        assert parser(arguments[0]).parse_args(arguments).run is parsed.run
    assert command.description


def test_the_help_tells_every_word_without_importing_its_module() -> None:
    assert parser("--help").format_help() == parser().format_help()


def test_no_flag_may_be_shortened() -> None:
    for command in all_commands(parser()):
        assert isinstance(command, Parser)
        assert not command.allow_abbrev


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nothing-of-ours",),
        ("orders",),
        ("orders", "place", "--count", "0"),
        ("orders", "place", "--count", "-1"),
        ("orders", "place", "--count", "1_0"),
        ("orders", "place", "--start", "0"),
        ("event", "duplicate", "--times", "3"),
        ("event", "duplicate", "--order", "1", "--times", "0"),
        ("job", "run", "j", "--amount", "much"),
        ("up", "--ui-port", "65536"),
    ],
)
def test_wrong_usage_gets_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


def test_the_help_is_printed_where_characters_cannot_be_shown(nothing: Cli) -> None:
    result = nothing("--help", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.exit_code == 0
    assert "starter.py up" in result.stdout


def test_arguments_that_are_no_text_are_wrong_usage(nothing: Cli) -> None:
    nothing("orders", "show", "\udcff", env={"PYTHONUTF8": "1"}).refused("UTF-8", code=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("orders", "place", "--cuont", "3"), "starter.py orders place: unrecognized arguments: --cuont 3"),
        (("down", "--now"), "starter.py down: unrecognized arguments: --now"),
        (
            ("job", "run", "j", "--amount", "x"),
            "starter.py job run: argument --amount: must be a whole number, not 'x'",
        ),
    ],
)
def test_the_command_tells_what_it_does_not_know(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser(arguments[0]).parse_args(arguments)
    program, _, _ = told.partition(":")
    assert capsys.readouterr().err == f"{told}; see {program} --help\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("orders", "place", "--sku", "tea"),
        ("orders", "place", "--id", "A-7"),
        ("dead", "redrive"),
        ("read-api", "--api", "nonsense"),
    ],
)
def test_what_makes_no_sense_together_is_told_by_the_command_whose_help_explains_it(
    nothing: Cli, inside: Inside, arguments: tuple[str, ...]
) -> None:
    result = inside(nothing, *arguments)
    program = " ".join(["starter.py", *itertools.takewhile(lambda word: not word.startswith("-"), arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(rf"{program}: [^\n]+; see {program} --help\n", result.stderr), result.stderr

"""How a command is declared: its parser, its function, and an example that its help shows."""

import argparse
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from contracts.errors import SaiseiError

if TYPE_CHECKING:
    from commands.context import Context

Run = Callable[["Context", argparse.Namespace], Awaitable[int]]


class WrongUsage(SaiseiError):
    """Arguments that the parser takes and that make no sense together; exit code 2."""


class Parser(argparse.ArgumentParser):
    """Wrong usage gets one sentence and exit code 2."""

    def __init__(self, **options: Any) -> None:
        # A shortened flag would change its meaning once another one begins like it.
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know is told by the command, whose help lists what it knows."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class Commands:
    """The top level, to which each module of this package adds its commands."""

    def __init__(self, subparsers: "argparse._SubParsersAction[Parser]", summaries: Mapping[str, str]) -> None:
        """`summaries`: what each word of the top level is for."""
        self._top = subparsers
        self._summaries = summaries

    def command(self, name: str, run: Run, example: str) -> argparse.ArgumentParser:
        """A word that is a command by itself, such as `status`."""
        return command(self._top, name, run, self._summaries[name], example)

    def group(self, name: str) -> "argparse._SubParsersAction[Parser]":
        """A word that takes a second one, such as `orders place`."""
        summary = self._summaries[name]
        parser = self._top.add_parser(name, help=summary, description=summary)
        return parser.add_subparsers(dest=f"{name}_command", required=True, metavar="COMMAND")

    def mention(self, name: str) -> None:
        """A word that was not said: a line of help."""
        self._top.add_parser(name, help=self._summaries[name])


def command(
    group: "argparse._SubParsersAction[Parser]", name: str, run: Run, summary: str, example: str
) -> argparse.ArgumentParser:
    """Declare one command. Its help ends with `example`, which can be pasted."""
    parser = group.add_parser(
        name,
        help=summary,
        description=summary[:1].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(run=run, program=parser.prog)
    return parser


def integer(text: str) -> int:
    """The type of an argument whose bounds are told where it is used."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number in these bounds."""

    def parse(text: str) -> int:
        # int() also takes 1_000 and other digits than 0 to 9.
        if not (text.isascii() and text.isdigit() and low <= int(text[:20]) <= high):
            raise argparse.ArgumentTypeError(f"must be a whole number from {low:,} to {high:,}, not {text!r}")
        return int(text)

    return parse

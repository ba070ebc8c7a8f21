"""Saisei's command line. `starter.py --help` lists the commands; each `--help` has an example.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage or settings, 130 interrupted. Errors are one sentence on stderr.
"""

import argparse
import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    # What follows takes a moment to import; Ctrl-C meanwhile ends us as it ends any program, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from commands.output import silence_stdout
from commands.parsing import Parser, Run, WrongUsage
from commands.registry import add_words
from config import end
from contracts.errors import WrongSettings

if TYPE_CHECKING:
    from commands.context import Context


def parser(said: str | None = None) -> Parser:
    """The command line: the whole, or as far as the word that was `said` needs it."""
    top = Parser(
        prog="starter.py",
        description="Saisei (再生): an order-event pipeline on Temporal.",
        epilog="example:\n  starter.py up\n  starter.py orders place --start 1 --count 12\n  starter.py status\n\n"
        "exit codes: 0 done, 1 refused or failed, 2 wrong usage or settings, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_words(top, said)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    context, program = None, "starter.py"
    try:
        # The word comes first; what is said instead of it is told by the parser.
        args = parser(next(iter(arguments), "")).parse_args(arguments)
        program = args.program  # with the words of the command, as its parser says it
        if any(not _is_text(word) for word in arguments):
            return _failed("the arguments must be valid UTF-8", 2)
        from commands.context import Context  # here, since `--help` needs none of it
        from config import unknown_settings

        context = Context(args)
        if ignored := unknown_settings():
            context.say(ignored)
        run: Run = args.run
        code = asyncio.run(_run(run, context, args))
        # A full disk is told here and not after our exit.
        context.flush()
        return code
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        # A walk-through piped into `head` is broken off. Not by SIGPIPE, which would also end us, without a word and
        # without cleaning up, when a server or the guard goes away.
        silence_stdout()
        return 1
    except WrongUsage as error:
        return _failed(f"{' '.join(str(error).split())}; see {program} --help", 2, program)
    except Exception as error:
        from failures import FAILURES, sentence  # here, since it knows every library that can fail

        if not isinstance(error, FAILURES):
            raise
        return _failed(sentence(error), 2 if isinstance(error, WrongSettings) else 1)
    finally:
        if context is not None:
            context.close()


async def _run(run: Run, context: "Context", args: argparse.Namespace) -> int:
    return await run(context, args)


def _failed(why: str, code: int, who: str = "starter.py") -> int:
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()
    with contextlib.suppress(OSError):
        print(f"{who}: {why}", file=sys.stderr)
    return code


def _is_text(word: str) -> bool:
    return word.encode(errors="replace").decode() == word


def program() -> NoReturn:
    """The process around `main`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets it escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    end(main())


if __name__ == "__main__":
    program()

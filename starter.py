"""Saisei's command line. `starter.py --help` lists the commands; each `--help` has an example.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage. Errors are one sentence on stderr.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from redis import RedisError
from sqlalchemy.exc import DBAPIError
from temporalio.service import RPCError

from commands import api, orders
from commands.context import Context
from commands.parsing import Commands, Parser, Run
from contracts.errors import SaiseiError

_MODULES = (orders, api)


def parser() -> Parser:
    """The whole command line."""
    top = Parser(prog="starter.py", description="Saisei (再生): an order-event pipeline on Temporal.")
    commands = Commands(top.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    for module in _MODULES:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    # Piped into `head`, end quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parser().parse_args(arguments)
    context = None
    try:
        context = Context(args)
        run: Run = args.run
        return asyncio.run(_run(run, context, args))
    except KeyboardInterrupt:
        return 130
    except SaiseiError as error:
        sentence = str(error)
    except DBAPIError as error:
        sentence = f"the database failed: {str(error.orig).strip().splitlines()[0]}"
    except RedisError as error:
        sentence = f"Redis failed: {error}"
    except RPCError as error:
        sentence = f"Temporal failed: {error.message}"
    except OSError as error:
        sentence = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    finally:
        if context is not None:
            context.close()
    print(f"starter.py: {sentence}", file=sys.stderr)
    return 1


async def _run(run: Run, context: Context, args: argparse.Namespace) -> int:
    return await run(context, args)


if __name__ == "__main__":
    sys.exit(main())

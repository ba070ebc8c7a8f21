"""`fault on` and `fault off`: drill switches that make a receiver fail, or be away, until they are off again."""

from argparse import ArgumentParser, Namespace

from commands.context import Context
from commands.parsing import Commands, command
from commands.telling import wake
from contracts.errors import Refused
from contracts.names import receiver_id
from store.dead_letters import require_receiver
from store.faults import ERROR, OUTAGE, clear_fault, set_fault
from store.receiver_ends import read_end

_DEFAULT = "sales"


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("fault")
    on = command(
        group,
        "on",
        _on,
        "make a receiver fail for every event (error), or be unavailable (outage)",
        "starter.py fault on --receiver sales --mode outage",
    )
    on.add_argument(
        "--mode",
        choices=(ERROR, OUTAGE),
        default=ERROR,
        help=f"{ERROR}: each event fails and becomes a dead letter; {OUTAGE}: it is held and nothing is spent "
        f"({ERROR} if not said)",
    )
    off = command(group, "off", _off, "let a receiver work again", "starter.py fault off --receiver sales")
    for parser in (on, off):
        _add_receiver(parser)


def _add_receiver(parser: ArgumentParser) -> None:
    parser.add_argument("--receiver", default=_DEFAULT, help=f"the receiver's name ({_DEFAULT} if not said)")


async def _on(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        require_receiver(connection, args.receiver)
        end = read_end(connection, args.receiver)
        if end is not None:
            raise Refused(f"{end.sentence()}; nothing was changed")
        set_fault(connection, args.receiver, args.mode)
    if context.json:
        context.result({"receiver": args.receiver, "mode": args.mode})
    else:
        does = "is unavailable" if args.mode == OUTAGE else "fails for every event"
        context.line(f"{args.receiver} {does} until `fault off --receiver {args.receiver}`")
    return 0


async def _off(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        require_receiver(connection, args.receiver)
        changed = clear_fault(connection, args.receiver)
    if changed:
        await wake(context, [receiver_id(args.receiver)])
    if context.json:
        context.result({"receiver": args.receiver, "mode": None, "changed": changed})
    else:
        context.line(f"{args.receiver} works again" if changed else f"no fault was on at {args.receiver}")
    return 0

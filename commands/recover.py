"""`recover-outbox`: by hand, and for all of it at once, what the worker's look does for events that are late."""

from argparse import Namespace

from commands.context import Context
from commands.parsing import Commands
from commands.telling import wake
from contracts.counts import counted
from contracts.names import FAN_OUT_ID, RELAY_ID
from pipeline.recovery import recover_outbox
from pipeline.writer import Writer
from store.clock import now_ms


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("recover-outbox", _recover, "starter.py recover-outbox")


async def _recover(context: Context, args: Namespace) -> int:
    events = context.events
    writer = Writer(context.database)
    try:
        count = await recover_outbox(writer, events, before=now_ms())
    finally:
        writer.close()
    if count:
        await wake(context, [RELAY_ID, FAN_OUT_ID])
    if context.json:
        context.result({"recovered": count})
    else:
        context.line(
            f"the relay sends {counted(count, 'event')} again that Redis lost" if count else "Redis lost nothing"
        )
    return 0

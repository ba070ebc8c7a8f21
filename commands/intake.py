"""`intake pause` and `intake resume`: whether new orders are taken."""

from argparse import Namespace

from commands.context import Context
from commands.parsing import Commands, command
from store.control import OPERATOR, pause_by_hand, read_control, resume_intake
from store.schema import OPEN, PAUSED


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("intake")
    command(
        group,
        "pause",
        _pause,
        "take no new orders; what was taken flows on, and known orders are answered",
        "starter.py intake pause",
    )
    command(group, "resume", _resume, "take new orders again; refused while a rebuild runs", "starter.py intake resume")


async def _pause(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        changed = pause_by_hand(connection, OPERATOR)
        by = read_control(connection).paused_by
    _tell(context, PAUSED, by, changed, "intake is paused" if changed else f"intake is paused already, by {by}")
    return 0


async def _resume(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        changed = resume_intake(connection)
    _tell(context, OPEN, None, changed, "intake is open again" if changed else "intake is open already")
    return 0


def _tell(context: Context, state: str, by: str | None, changed: bool, sentence: str) -> None:
    if context.json:
        context.result({"intake": state, "paused_by": by, "changed": changed})
    else:
        context.line(sentence)

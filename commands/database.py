"""`init`: the database's tables and rows, and the search attributes of Temporal when it answers."""

from argparse import Namespace

import sqlalchemy as sa
from sqlalchemy import Connection

from commands.context import Context
from commands.parsing import Commands
from contracts.counts import counted
from contracts.errors import Unreachable
from receivers.registry import by_name
from runs.search_attributes import missing_search_attributes, register_search_attributes
from store.clock import now_ms
from store.control import initialize
from store.receivers import register_receiver
from store.schema import control, generations, metadata, receivers, subscriptions


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("init", _init, "starter.py init")


async def _init(context: Context, args: Namespace) -> int:
    with context.open_database().write() as connection:
        before = _present(connection)
        initialize(connection, now_ms())
        for receiver in by_name().values():
            register_receiver(connection, receiver.name, receiver.event_types)
        made = _present(connection) - before
    names = sorted(by_name())
    attributes = await _attributes(context)
    if context.json:
        context.result(
            {
                "database": "changed" if made else "unchanged",
                "added": sorted(made),
                "receivers": names,
                "search_attributes": attributes,
            }
        )
        return 0
    of = f"{counted(len(metadata.tables), 'table')}, receivers {', '.join(names)}"
    what = "unchanged" if not made else f"added {', '.join(sorted(made))}" if before else "set up"
    context.line(f"database: {what} ({of})")
    if attributes is not None:
        context.line(f"search attributes: {'registered' if attributes else 'unchanged'}")
    return 0


async def _attributes(context: Context) -> list[str] | None:
    """Names that were registered now, or None, said on stderr, when Temporal is not there."""
    try:
        client = await context.client()
    except Unreachable as error:
        context.say(f"search attributes are registered by the worker's start: {error}")
        return None
    missing = await missing_search_attributes(client)
    if missing:
        await register_search_attributes(client)
    return missing


def _present(connection: Connection) -> set[str]:
    """What `init` makes, by name, as far as it is there."""
    tables = set(sa.inspect(connection).get_table_names()) & set(metadata.tables)
    found = {f"table {name}" for name in tables}
    for table, what in (
        (control, [control.c.id]),
        (generations, [generations.c.generation]),
        (receivers, [receivers.c.receiver]),
        (subscriptions, [subscriptions.c.receiver, subscriptions.c.event_type]),
    ):
        if table.name in tables:
            for row in connection.execute(sa.select(*what)):
                found.add(f"{table.name} {' '.join(map(str, row))}")
    return found

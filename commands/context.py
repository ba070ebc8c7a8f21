"""What every command gets: settings, the database, Redis, Temporal, and where to print.

Results go to stdout (a table or lines, or one JSON document with `--json`), messages and progress to stderr, so that
output can be piped. The libraries of the servers are imported where one is opened: each takes 0.1 to 0.3 s, and few
commands need all of them.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import embedded
from commands.links import Links
from commands.output import silence_stdout
from config import Settings
from contracts.errors import NotFound, Unreachable
from runs.profile import configured_address, configured_namespace
from store.control import read_control
from store.engine import Database

if TYPE_CHECKING:
    from temporalio.client import Client

    from pipeline.event_list import EventList
    from runs.starts import Runs


class _Output(Console):
    """A console whose reader may leave (`| head`): the work goes on, since it must not depend on who reads of it, and
    so the exit code tells of the work."""

    def on_broken_pipe(self) -> None:
        silence_stdout()


class Context:
    """One run of a command. What it opens is closed by `close`."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.json: bool = args.json
        self.settings = Settings.from_env()
        # Ids may hold [brackets] and :colons:, which are no mark-up here.
        self.out = _Output(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
        self.messages = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._opened: list[Any] = []
        self._client: Client | None = None

    @cached_property
    def stack(self) -> embedded.Stack | None:
        """The embedded stack of this home, when one is up."""
        return embedded.find(self.settings.home)

    @cached_property
    def database(self) -> Database:
        """The database, which answers and is set up. Raises Unreachable or NotFound (`init` makes it)."""
        database = self.open_database(make=False)
        try:
            with database.read() as connection:
                read_control(connection)
        except NotFound:
            raise
        except Exception as error:
            if "no such table" in str(error) or "UndefinedTable" in repr(error):
                raise NotFound("the database is not set up; run `starter.py init`") from error
            raise
        return database

    def open_database(self, *, make: bool = True) -> Database:
        """The database as it is, set up or not. Raises Unreachable, and NotFound for an SQLite file that is not there,
        unless it is to be made."""
        database = Database(self.settings.database_url, busy_timeout=self.settings.busy, make=make)
        self._opened.append(database)
        database.ping()
        return database

    @cached_property
    def events(self) -> "EventList":
        """The Redis list. Raises Unreachable."""
        from pipeline import event_list

        url = self.settings.redis_url or (self.stack.redis_url if self.stack else None)
        if url is None:
            raise Unreachable("no Redis server is running here; start one with `make up`, or set REDIS_URL")
        events = event_list.EventList(event_list.connect(url))
        self._opened.append(events)
        events.ping()
        return events

    async def client(self) -> "Client":
        """A Temporal client. Raises Unreachable."""
        if self._client is None:
            from runs.connect import connect

            self._client = await connect(self.stack.temporal_address if self.stack else None)
        return self._client

    async def runs(self) -> "Runs":
        """Starts and wakes runs. Raises Unreachable."""
        from receivers.registry import by_name  # here: one that fails to load must not keep `down` from working
        from runs.starts import Runs

        return Runs(await self.client(), tuple(by_name()), self.settings.timings)

    @property
    def ui_url(self) -> str | None:
        """Base of links into the Web UI: TEMPORAL_UI_URL, or the embedded server's when that is the one in use."""
        if self.stack is not None and configured_address() in (None, self.stack.temporal_address):
            return self.stack.ui_url
        return self.settings.ui_url

    @property
    def links(self) -> Links | None:
        """Builds links into the Web UI, or None where there is none."""
        return Links(self.ui_url, configured_namespace()) if self.ui_url else None

    def say(self, message: str) -> None:
        """A message for a person, on stderr."""
        self.messages.print(message, soft_wrap=True)

    def line(self, text: str) -> None:
        """A line of the result, as it is, whatever it holds and however wide the terminal is."""
        self.out.print(text, soft_wrap=True)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Rows of a result: a table on a terminal, otherwise plain lines whose columns are aligned."""
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        if self.out.is_terminal:
            drawn = Table(*(Column(header, overflow="fold") for header in headers), box=SIMPLE_HEAD)
            for row in cells:
                drawn.add_row(*(Text(cell) for cell in row))
            self.out.print(drawn)
            return
        widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
        for row in [list(headers), *cells]:
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def fields(self, values: Mapping[str, object]) -> None:
        """One thing's fields, a line each; what it does not have is left out."""
        shown = {name: value for name, value in values.items() if value not in (None, "")}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.line(f"{name:{width}}  {value}")

    def result(self, document: Any) -> None:
        """The one JSON document of `--json`."""
        try:
            print(json.dumps(document, ensure_ascii=False))
        except BrokenPipeError:
            silence_stdout()

    def flush(self) -> None:
        """Write what was printed. Raises OSError where it cannot be written, for another reason than that its reader
        left."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            silence_stdout()

    def close(self) -> None:
        """Close what was opened."""
        for opened in reversed(self._opened):
            opened.close()

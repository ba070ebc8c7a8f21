"""Following a record of the database until it is over: it tells how far the work is, whoever does it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rich.progress import Progress, ProgressColumn
from sqlalchemy import Connection

from commands.context import Context

_POLL = 0.05

R = TypeVar("R")


def progress(context: Context, *columns: str | ProgressColumn) -> Progress:
    """A bar (rich's own columns if none are given) for a person at a terminal; it goes when the work is over."""
    return Progress(
        *columns,
        console=context.messages,
        transient=True,
        disable=context.json or not context.messages.is_terminal,
    )


async def follow(
    context: Context,
    bar: Progress,
    record: R,
    *,
    read: Callable[[Connection], R],
    runs: Callable[[R], bool],
    show: Callable[[R], Mapping[str, Any]],
    leaving: str,
    silence: float,
    why: Callable[[R], Awaitable[str | None]],
) -> R:
    """`record` as it is once it does not run any more.

    `show`: what the bar shows of it. `leaving`: said to whoever ends the command before. `why` is asked whenever
    nothing has moved for `silence` seconds, and its answer said when it is another one than before.
    """

    def again() -> R:
        with context.database.read() as connection:
            return read(connection)

    moved, said = time.monotonic(), None
    with bar:
        task = bar.add_task("", total=1)
        while runs(record):
            bar.update(task, **show(record))
            try:
                await asyncio.sleep(_POLL)
            except asyncio.CancelledError:
                context.say(leaving)
                raise
            before, record = record, await asyncio.to_thread(again)
            if record != before:
                moved = time.monotonic()
            elif time.monotonic() - moved > silence:
                moved = time.monotonic()
                sentence = await why(record)
                if sentence is not None and sentence != said:
                    said = sentence
                    context.say(sentence)
    return record

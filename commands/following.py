"""Following a record of the database until it is over: it tells how far the work is, whoever does it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.progress import Progress, ProgressColumn
from sqlalchemy import Connection

from commands.context import Context

_POLL = 0.05

MANY = 20  # pieces of work that are worth a bar

R = TypeVar("R")


def progress(context: Context, *columns: str | ProgressColumn, wanted: bool = True, stays: bool = False) -> Progress:
    """A bar (rich's own columns if none are given) for a person at a terminal, and nothing anywhere else; it goes when
    the work is over, unless it `stays`."""
    return Progress(
        *columns,
        console=context.messages,
        transient=not stays,
        redirect_stdout=False,  # a result goes where it is sent to, also beside a bar
        disable=not wanted or context.json or not context.messages.is_terminal,
    )


@contextmanager
def watched(context: Context, doing: str, pieces: Sequence[R]) -> Iterator[Iterable[R]]:
    """The pieces, to be gone through in the block; a bar tells how far that is, where they are many."""
    with progress(context, wanted=len(pieces) >= MANY) as bar:
        yield bar.track(pieces, description=doing)


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

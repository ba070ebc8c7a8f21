"""Long work on the database in short transactions, so that nobody waits for the write lock meanwhile."""

import asyncio
import time
from collections.abc import Callable

from sqlalchemy import Connection

from commands.context import Context
from commands.following import progress

_TARGET = 0.015  # seconds that a transaction should take
NARROWEST, _FIRST, _WIDEST = 200, 2_000, 20_000


async def in_chunks(context: Context, doing: str, total: int, work: Callable[[Connection, int], int]) -> int:
    """Call `work(connection, limit)` in a transaction each until it finds fewer than `limit`; how many in all.

    `doing` and `total` (an estimate) are what a progress bar shows meanwhile.
    """

    def chunk(limit: int) -> tuple[int, float]:
        """How many it found, and for how many seconds others could not write."""
        with context.database.write() as connection:
            begun = time.monotonic()
            return work(connection, limit), time.monotonic() - begun

    bar = progress(context)
    done, limit = 0, _FIRST
    with bar:
        task = bar.add_task(doing, total=total)
        while True:
            found, seconds = await asyncio.to_thread(chunk, limit)
            done += found
            bar.update(task, completed=done)
            if found < limit:
                return done
            limit = int(min(_WIDEST, max(NARROWEST, limit * min(2.0, max(0.5, _TARGET / max(seconds, 0.0005))))))

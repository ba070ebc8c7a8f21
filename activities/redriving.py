"""The work of a redrive: dead letters become pending again, a few short transactions at a time."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.errors import NotFound
from contracts.messages import RedriveInput, RedriveReport
from contracts.names import REDRIVE_RUNNING
from pipeline.stage import BatchSize
from pipeline.writer import Writer
from store.clock import now_ms
from store.redrives import Chunk, Redrive, cancel_redrive, take_chunk

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK = 2000  # items an activity; a cancel waits for no more than these


class RedriveActivities:
    """Chunks of a redrive, and its end by a cancel."""

    def __init__(self, writer: Writer, wake: Callable[[Sequence[str]], Awaitable[None]], *, chunk: int = CHUNK) -> None:
        """`wake(receivers)` tells the receivers that have work again."""
        self._writer = writer
        self._wake = wake
        self._chunk = chunk

    @activity.defn
    async def redrive_chunk(self, message: RedriveInput) -> RedriveReport:
        """Take the next chunk of the frozen set; how far the redrive is then.

        A worker that dies after its commit loses nothing and takes nothing twice: the counts are the database's, and
        the next attempt goes on with what is left. Raises ApplicationError `NotFound`, not to be retried.
        """
        size = BatchSize()
        items = 0
        woken: set[str] = set()
        while True:
            limit = min(size.value, self._chunk - items)
            chunk = await self._found(partial(self._take, request_id=message.request_id, limit=limit, size=size))
            items += chunk.items
            woken.update(chunk.receivers)
            activity.heartbeat(items)
            if items >= self._chunk or chunk.redrive.state != REDRIVE_RUNNING or activity.is_worker_shutdown():
                break
        try:
            if woken:
                await self._wake(sorted(woken))
        except Exception as error:
            # Temporal is away: the items are pending, and the look wakes whoever they wait for.
            logger.warning("receivers %s not woken: %s", ", ".join(sorted(woken)), error)
        return _report(chunk.redrive)

    @activity.defn
    async def cancel_redrive(self, message: RedriveInput) -> RedriveReport:
        """End the redrive where it stands, unless it is complete; how far it came."""
        redrive = await self._found(
            lambda connection: cancel_redrive(connection, message.request_id, "its run was cancelled", now_ms())
        )
        return _report(redrive)

    async def _found(self, work: Callable[[Connection], T]) -> T:
        try:
            return await self._writer.write(work)
        except NotFound as error:
            raise ApplicationError(str(error), type="NotFound", non_retryable=True) from error

    def _take(self, connection: Connection, request_id: str, limit: int, size: BatchSize) -> Chunk:
        started = time.monotonic()
        chunk = take_chunk(connection, request_id, limit, now_ms())
        size.observe(chunk.items, time.monotonic() - started)
        return chunk


def _report(redrive: Redrive) -> RedriveReport:
    return RedriveReport(redrive.state, redrive.total, redrive.taken, redrive.skipped)

"""Runs of failing events: each is started when its event's next attempt is due, and not before.

The start of a run costs Temporal's server 5 to 8 ms of processor. In the second in which an event fails everybody
drains, and its run could only wait. What is due and has no run the database tells; a run is claimed there before it is
started, so a worker that dies in between leaves one that is overdue, and is started again.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from sqlalchemy import Connection

from contracts.messages import DeliveryInput
from pipeline.writer import Writer
from store.clock import now_ms, seconds_until
from store.deliveries import Retrying, claim_runs, retrying_of

logger = logging.getLogger(__name__)

# Runs of failing events that one receiver has open at a time: each is a workflow, and costs the server its share.
MOST_OPEN_RUNS = 32
_SHORTEST = 0.1  # seconds between two claims: hundreds that fell due one by one would be as many transactions


class Retries:
    """Used on the worker's event loop only."""

    def __init__(self, writer: Writer, start: Callable[[DeliveryInput], Awaitable[object]], run_grace: float) -> None:
        """`start` starts a DeliveryWorkflow; one that is overdue by `run_grace` seconds is started again."""
        self._writer = writer
        self._start = start
        self._grace_ms = int(run_grace * 1000)
        self._due: dict[str, int] = {}  # receiver -> when (UTC ms) the next run of it is to be started
        self._claimed_at = 0.0

    async def see(self, retrying: Mapping[str, Retrying]) -> None:
        """What each receiver has `retrying`, as it was read: start what is due by now, and know when more will be."""
        for receiver, found in retrying.items():
            self._note(receiver, found)
        for receiver, found in retrying.items():
            now = now_ms()
            if found.want_runs(MOST_OPEN_RUNS, now, now - self._grace_ms):
                await self.start_due(receiver)

    async def start_due(self, receiver: str) -> int:
        """Start the runs of the receiver's events that are due, oldest first, within the bound; how many."""
        self._due.pop(receiver, None)  # if it fails now, the next look sees to it
        self._claimed_at = time.monotonic()
        runs, left = await self._writer.write(partial(self._claim, receiver=receiver))
        self._note(receiver, left)
        for started, (event_id, aggregate_id) in enumerate(runs):
            try:
                await self._start(DeliveryInput(receiver, event_id, aggregate_id))
            except Exception:
                logger.warning(
                    "%d of %d runs at %s not started; once overdue they are", len(runs) - started, len(runs), receiver
                )
                raise
        return len(runs)

    def due(self) -> list[str]:
        """Receivers that had nothing due when they were seen last, and have by now."""
        now = now_ms()
        return [receiver for receiver, due in self._due.items() if due <= now]

    def seconds(self) -> float | None:
        """Until it is worth while to ask what is due; None: not before the next look."""
        if not self._due:
            return None
        rest = self._claimed_at + _SHORTEST - time.monotonic()
        return max(seconds_until(min(self._due.values())), rest, 0.0)

    def _claim(self, connection: Connection, receiver: str) -> tuple[list[tuple[str, str]], Retrying]:
        now = now_ms()
        runs = claim_runs(connection, receiver, MOST_OPEN_RUNS, now=now, overdue=now - self._grace_ms)
        return runs, retrying_of(connection, receiver)

    def _note(self, receiver: str, found: Retrying) -> None:
        due = found.next_due(MOST_OPEN_RUNS)
        if due is None:
            self._due.pop(receiver, None)
        else:
            self._due[receiver] = due

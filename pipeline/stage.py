"""A stage of the pipeline and how it is drained: batch after batch while it is hot, then back to rest."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contracts.messages import DrainReport
from pipeline.hub import Hub
from store.receivers import Hold

# How long a stage waits for word before it looks for itself: work may come from another process. One whose feeder is
# drained in this process, or that can watch, is told of work, and looks seldom.
_SHORTEST_POLL, _LONGEST_POLL = 0.003, 0.05
# A receiver on hold is probed at these waits: seldom enough to leave it alone, often enough to go on within seconds.
_SHORTEST_PROBE, _LONGEST_PROBE = 0.1, 1.0
_SMALLEST, _LARGEST = 50, 2000
_AIM = 0.016  # seconds that a batch keeps the writer: whoever places an order waits for one transaction at most


class Stage(Protocol):
    """One step of the way. `name` is also the workflow id of its run."""

    name: str
    # The stage that hands work to this one, and sends word; None: any process may, without a word.
    fed_by: str | None
    # Tells at next to no cost whether there may be work, where anything does.
    watch: Callable[[], bool] | None
    # Whether the last step that moved something may have left more.
    more: bool
    # What keeps the stage from working, if its other side is down. Known after `begin`, renewed by `step`.
    hold: Hold | None
    # What the oldest event that is left waits for, a sentence; known once `may_rest` said yes.
    waits: str | None

    async def begin(self) -> None:
        """Called once when a drain starts."""

    async def sees_work(self) -> bool:
        """Asked before a step that nobody sent word for: whether it may find something."""

    async def step(self) -> int:
        """Move one batch on; how many events moved."""

    async def may_rest(self, idle: float) -> bool:
        """Asked after `idle` seconds without work: whether the drain may end now."""


@dataclass(frozen=True)
class Limits:
    """When a drain ends, in seconds: after `idle` without work, after `longest` in any case."""

    idle: float
    longest: float


async def drain(
    stage: Stage,
    hub: Hub,
    limits: Limits,
    *,
    stopping: Callable[[], bool],
    beat: Callable[[int, int], None],
    held_since: int | None = None,
) -> DrainReport:
    """Drain the stage while it is hot. `beat(events, batches)` is called at every turn; `stopping` ends it early, and
    so does any hold but the one since `held_since` (UTC ms), of which the stage's run knows."""
    events = batches = 0
    started = time.monotonic()
    idle_since: float | None = None
    poll, probe = _SHORTEST_POLL, _SHORTEST_PROBE

    def report(*, more: bool) -> DrainReport:
        hold = stage.hold
        waits = None if more else stage.waits
        return DrainReport(events, batches, more, hold.since if hold else None, hold.reason if hold else None, waits)

    with hub.draining(stage.name):
        await stage.begin()
        told = await hub.wait(stage.name, 0)
        while True:
            beat(events, batches)
            if stopping() or time.monotonic() - started >= limits.longest:
                return report(more=True)
            moved = await stage.step() if told or await stage.sees_work() else 0
            events += moved
            batches += bool(moved)
            if (stage.hold.since if stage.hold else None) != held_since:
                return report(more=True)  # so that the run can say so
            if moved:
                idle_since = None
                poll = _SHORTEST_POLL
                told = stage.more
                if told:
                    continue
            else:
                now = time.monotonic()
                idle_since = idle_since or now
                may_rest = now - idle_since >= limits.idle and await stage.may_rest(now - idle_since)
                # Word that came after that last look would be lost: whoever gave it saw a drain at work, and sent no
                # wake.
                if may_rest and not hub.is_notified(stage.name):
                    return report(more=False)
            if stage.hold is not None:
                await asyncio.sleep(probe)
                probe = min(probe * 2, _LONGEST_PROBE)
                told = True
                continue
            if stage.watch is not None or (stage.fed_by is not None and hub.is_draining(stage.fed_by)):
                poll = _LONGEST_POLL
            told = await hub.wait(stage.name, poll, stage.watch)
            if stage.fed_by is not None:
                poll = min(poll * 2, _LONGEST_POLL)


class BatchSize:
    """How many events a batch takes: as many as fit into 16 ms, between 50 and 2000.

    A fixed size is too large where the disk or a receiver is slow (others wait for the write lock) and too small
    where they are fast (each batch costs its share of an fsync, and a round through the stages).
    """

    def __init__(self, first: int = 500) -> None:
        self.value = first

    def observe(self, events: int, seconds: float, *, left: int = 0) -> None:
        """A batch of `events` took `seconds`, and `left` more were read and not reached. A small one that was quick
        says nothing about large ones."""
        if events >= self.value or seconds > _AIM or left > 0:
            fitting = int(events * _AIM / max(seconds, 0.0001))
            self.value = max(_SMALLEST, min(_LARGEST, (self.value + fitting) // 2))

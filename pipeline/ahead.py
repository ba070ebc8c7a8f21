"""Drains that begin ahead of their runs: after a rest the relay's run is woken alone, and the stages that it hands work
to are drained here at once, until their own runs have been woken and take over.

To wake a run takes Temporal's server and the worker some 50 ms of processor. Five at once kept the first order waiting
for all of them. Nothing depends on what begins here: it is a twin of the run's own drain, as in any second worker.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pipeline.hub import Hub
from pipeline.stage import Limits, Stage, drain

logger = logging.getLogger(__name__)

# For so many seconds after a rest a stage without a drain here gets one. Later on it is drained elsewhere.
_WINDOW = 5.0
# The first order has gone through by then; the wakes would take the processor from it.
_HEAD_START = 0.1


@dataclass(frozen=True)
class _Begun:
    task: "asyncio.Task[None]"
    stop: asyncio.Event


class Ahead:
    """Used on the worker's event loop only."""

    def __init__(
        self, stages: Iterable[Stage], hub: Hub, idle: float, wake: Callable[[Iterable[str]], Awaitable[None]]
    ) -> None:
        """`idle` in seconds, as in Limits; `wake` wakes the runs of stages."""
        self._stages = {stage.name: stage for stage in stages}
        self._hub = hub
        self._limits = Limits(idle, _WINDOW)
        self._wake = wake
        self._until = 0.0
        self._begun: dict[str, _Begun] = {}
        self._relieved: set[str] = set()
        self._asleep: list[str] = []
        self._waking: asyncio.Task[None] | None = None
        self._moved: Counter[str] = Counter()

    def after_rest(self) -> None:
        """The relay begins after a rest: the runs of the other stages may be asleep."""
        self._until = time.monotonic() + _WINDOW

    def begin(self, stage: str) -> None:
        """There is work for a stage that nobody drains here."""
        if stage not in self._stages or stage in self._begun or stage in self._relieved:
            return
        if time.monotonic() >= self._until:
            return
        stop = asyncio.Event()
        self._begun[stage] = _Begun(asyncio.create_task(self._drain(self._stages[stage], stop)), stop)
        self._asleep.append(stage)
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake_asleep())

    async def relieve(self, stage: str) -> int:
        """The run's own drain takes over: how many events were moved ahead of it."""
        self._relieved.add(stage)  # word that comes meanwhile begins nothing beside the run's own drain
        try:
            await self._end(stage)
        finally:
            self._relieved.discard(stage)
        if stage in self._asleep:
            self._asleep.remove(stage)
        return self._moved.pop(stage, 0)

    async def close(self) -> None:
        """End what was begun, each after the batch at hand, however long that takes; nothing is begun any more."""
        self._stages.clear()
        if self._waking is not None:
            self._waking.cancel()
        while self._begun:
            await self._end(next(iter(self._begun)))

    async def _end(self, stage: str) -> None:
        begun = self._begun.get(stage)
        if begun is not None:
            begun.stop.set()
            self._hub.notify([stage])  # it may wait for word
            await asyncio.wait([begun.task])

    async def _drain(self, stage: Stage, stop: asyncio.Event) -> None:
        try:
            report = await drain(stage, self._hub, self._limits, stopping=stop.is_set, beat=lambda *_: None)
            self._moved[stage.name] += report.events
        except Exception as error:
            # Its run meets the same, and Temporal gets to know.
            logger.info("%s was not drained ahead of its run: %s", stage.name, error)
        finally:
            del self._begun[stage.name]

    async def _wake_asleep(self) -> None:
        try:
            await asyncio.sleep(_HEAD_START)
            while self._asleep:
                # One by one: together they would take the processor from the orders that come meanwhile.
                await self._wake([self._asleep.pop(0)])
        except Exception as error:
            self._asleep.clear()
            logger.info("a wake failed (%s); the look finds what is left", error)
        finally:
            self._waking = None

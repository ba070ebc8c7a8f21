"""Handing over between the stages of one worker: a stage that has written says so, and the next need not poll."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

_WATCH_EVERY = 0.001  # seconds


class Hub:
    """One event a stage. Used on the worker's event loop only."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._draining: Counter[str] = Counter()
        # Told of a stage that has word and that nobody drains here.
        self.absent: Callable[[str], None] = lambda stage: None

    def notify(self, stages: Iterable[str]) -> None:
        """There is work for these."""
        for stage in stages:
            self._event(stage).set()
            if not self.is_draining(stage):
                self.absent(stage)

    async def wait(self, stage: str, timeout: float, watch: Callable[[], bool] | None = None) -> bool:
        """Until the stage is notified, or `watch` says so, which is asked every millisecond; whether that was within
        `timeout` seconds (work may also come from another process)."""
        event = self._event(stage)
        try:
            async with asyncio.timeout(timeout):
                if watch is None:
                    await event.wait()
                else:
                    while not (event.is_set() or watch()):
                        await asyncio.sleep(_WATCH_EVERY)
        except TimeoutError:
            return False
        event.clear()
        return True

    def is_notified(self, stage: str) -> bool:
        """Whether there is word for the stage that nobody has waited for yet."""
        return self._event(stage).is_set()

    @contextlib.contextmanager
    def draining(self, stage: str) -> Iterator[None]:
        """Marks the stage as drained by this worker for the block."""
        self._draining[stage] += 1
        try:
            yield
        finally:
            self._draining[stage] -= 1

    def is_draining(self, stage: str) -> bool:
        """Whether this worker drains the stage just now."""
        return self._draining[stage] > 0

    def _event(self, stage: str) -> asyncio.Event:
        return self._events.setdefault(stage, asyncio.Event())

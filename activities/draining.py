"""The activity behind the long-lived runs: drain one stage while it is hot."""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.messages import DrainInput, DrainReport
from pipeline.ahead import Ahead
from pipeline.hub import Hub
from pipeline.stage import Limits, Stage, drain

# Seconds between two heartbeats, and before the first: Temporal counts from the start. A drain that waits turns every
# few milliseconds, and a heartbeat at each turn took the worker longer than the looks for work; one at the start of
# each drain is five requests more to the server before the first order after a rest goes through.
_BEAT_EVERY = 1.0


class _Pulse:
    """Heartbeats with what was moved so far."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _BEAT_EVERY

    def beat(self, events: int, batches: int) -> None:
        """A drain's turn."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _BEAT_EVERY
            activity.heartbeat(events, batches)


class DrainActivities:
    """Drains the stages that this worker knows."""

    def __init__(
        self,
        stages: Iterable[Stage],
        hub: Hub,
        limits: Limits,
        why_ended: Callable[[str], Awaitable[str | None]],
        ahead: Ahead,
    ) -> None:
        """`why_ended(stage)`: the sentence of a receiver that was ended, or None; asked for unknown stages only."""
        self._why_ended = why_ended
        self._ahead = ahead
        self._stages = {stage.name: stage for stage in stages}
        self._hub = hub
        self._limits = limits

    @activity.defn
    async def drain(self, message: DrainInput) -> DrainReport:
        """Move batches on until there is nothing for a moment, or for about a minute; heartbeats at its turns.

        Raises what the database or Redis raised: Temporal tries again, and no event is blamed. Raises `ReceiverEnded`,
        which is not tried again and so ends the run, for a receiver that was ended.
        """
        stage = self._stages.get(message.stage)
        if stage is None:
            why = await self._why_ended(message.stage)
            if why is not None:
                raise ApplicationError(why, type="ReceiverEnded", non_retryable=True)
            # Another worker's version may know it; retried, and visible, until one does.
            raise ApplicationError(f"this worker knows no stage {message.stage}", type="UnknownStage")
        pulse = _Pulse()  # a slow batch that was begun ahead counts, too: the next one may be as slow
        ahead = await self._ahead.relieve(stage.name)
        report = await drain(
            stage,
            self._hub,
            self._limits,
            stopping=activity.is_worker_shutdown,
            beat=pulse.beat,
            held_since=message.held_since,
        )
        return replace(report, events=report.events + ahead)

"""Every activity with a heartbeat time-out beats by itself, so that a worker's death is noticed within seconds.

The beat tells that the worker lives, not that the work moves: it comes from the event loop, also while the work waits
in a thread for the database's lock or for a provider, and what bounds the work is its own time-out. A drain's heartbeat
does mean progress, so drains have a worker without this.
"""

import asyncio
from typing import Any

from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ActivityOutboundInterceptor, ExecuteActivityInput, Interceptor

EVERY = 1.0  # seconds; shorter where the time-out is


class Beating(Interceptor):
    """Given to a worker, it spares each of its activities a loop that beats."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Beating(next)


class _Beating(ActivityInboundInterceptor):
    def init(self, outbound: ActivityOutboundInterceptor) -> None:
        self._said = _Said(outbound)
        super().init(self._said)

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        timeout = activity.info().heartbeat_timeout
        if timeout is None:  # nobody listens, as with a local activity
            return await super().execute_activity(input)
        beats = asyncio.create_task(self._beat(min(EVERY, timeout.total_seconds() / 3)))
        try:
            return await super().execute_activity(input)
        finally:
            beats.cancel()

    async def _beat(self, every: float) -> None:
        # Not at once: most activities are over by then, and cost the server nothing.
        while True:
            await asyncio.sleep(every)
            self._said.pass_on()


class _Said(ActivityOutboundInterceptor):
    """What the activity says in heartbeats of its own goes out with the next beat, and with those after it.

    Sent at once, the word of an activity whose run is over would be refused just when the activity ends: the very race
    in which Temporal's core does not shut down (`worker.end_workers`).
    """

    _last: tuple[Any, ...] = ()

    def heartbeat(self, *details: Any) -> None:
        self._last = details

    def pass_on(self) -> None:
        super().heartbeat(*self._last)

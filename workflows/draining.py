"""What the runs of relay, fan-out and receivers are: drain, rest until woken or the safety timer fires, begin anew.

No wake is lost: a signal that comes while the drain runs makes another drain follow, and every new run, so also the
one after continue-as-new, begins with a drain.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from temporalio import workflow

from workflows.policies import DRAIN_RETRY

with workflow.unsafe.imports_passed_through():
    from activities.draining import DrainActivities
    from contracts.counts import counted
    from contracts.messages import DrainInput, DrainReport, ReceiverInput, StageInput
    from contracts.names import DRAIN_TASK_QUEUE


class DrainLoop:
    """Base of the long-lived runs, one workflow a stage. Deterministic: its clock and its waits are the workflow's."""

    def __init__(self, stage: str, message: StageInput | ReceiverInput) -> None:
        self.stage = stage
        self.timings = message.timings
        self.drains = message.drains
        self.events = message.events
        self._woken = False
        self._held_since: int | None = None

    @workflow.signal
    def wake(self) -> None:
        """An order was placed, work was found, or deliveries may be pending."""
        self._woken = True

    async def drain_for_ever(self, message: StageInput | ReceiverInput) -> NoReturn:
        """Drain and rest; as a new run whenever the server suggests it, with what was counted so far."""
        await self._until_continue_as_new()
        workflow.continue_as_new(replace(message, drains=self.drains, events=self.events))

    async def _until_continue_as_new(self) -> None:
        while not workflow.info().is_continue_as_new_suggested():
            self._woken = False
            if self._held_since is None:
                self._describe("draining")
            report = await self._drain()
            self.drains += 1
            self.events += report.events
            self._held_since = report.held_since
            if self._held_since is not None:
                self._describe_hold(report)
                if report.more:
                    # The drain probes by itself; this only keeps one that ends at once from spinning.
                    await workflow.sleep(timedelta(seconds=1), summary="on hold")
            if report.more or self._woken:
                continue
            if self._held_since is None:
                self._describe("at rest", report.waits)
            # The last net under a lost wake; the worker's look is the near one. Woken or not, a drain follows.
            await self._rest()

    async def _rest(self) -> None:
        try:
            await workflow.wait_condition(
                lambda: self._woken or workflow.info().is_continue_as_new_suggested(),
                timeout=timedelta(seconds=self.timings.safety_timer),
                timeout_summary="safety timer",
            )
        except TimeoutError:
            return

    async def _drain(self) -> DrainReport:
        return await workflow.execute_activity_method(
            DrainActivities.drain,
            DrainInput(self.stage, self._held_since),
            task_queue=DRAIN_TASK_QUEUE,
            start_to_close_timeout=timedelta(seconds=self.timings.drain_timeout),
            heartbeat_timeout=timedelta(seconds=self.timings.heartbeat_timeout),
            retry_policy=DRAIN_RETRY,
            summary=f"drain {self.stage}",
        )

    def _describe_hold(self, report: DrainReport) -> None:
        since = datetime.fromtimestamp((report.held_since or 0) / 1000, UTC)
        workflow.set_current_details(
            f"**{self.stage}** on hold since {since:%Y-%m-%d %H:%M:%S} UTC: {report.reason}\n\n"
            f"its events wait in order, no attempt is spent; {counted(self.events, 'event')} before"
        )

    def _describe(self, doing: str, waits: str | None = None) -> None:
        workflow.set_current_details(
            f"**{self.stage}** {doing} since {workflow.now():%Y-%m-%d %H:%M:%S} UTC\n\n"
            f"{counted(self.events, 'event')} in {counted(self.drains, 'drain')} before"
            + (f"\n\nas it came to rest, {waits}" if waits else "")
        )

"""The loop that relay, fan-out and receivers share: drain, rest until woken or the safety timer fires, continue as new.

No wake is lost: a signal that comes while the drain runs makes another drain follow, and every new run, so also the
one after continue-as-new, begins with a drain.
"""

from datetime import UTC, datetime, timedelta

from temporalio import workflow

from workflows.policies import DRAIN_RETRY

with workflow.unsafe.imports_passed_through():
    from activities.draining import DrainActivities
    from contracts.messages import DrainInput, DrainReport, Timings
    from contracts.names import DRAIN_TASK_QUEUE


class DrainLoop:
    """State of one long-lived run. Deterministic: its clock and its waits are the workflow's."""

    def __init__(self, stage: str, timings: Timings, drains: int, events: int) -> None:
        self.stage = stage
        self.timings = timings
        self.drains = drains
        self.events = events
        self._woken = False

    def wake(self) -> None:
        """There is work, or may be."""
        self._woken = True

    async def until_continue_as_new(self) -> None:
        """Drain and rest until the server suggests to continue as new."""
        held = False
        while not workflow.info().is_continue_as_new_suggested():
            self._woken = False
            if not held:
                self._describe("draining")
            report = await self._drain()
            self.drains += 1
            self.events += report.events
            held = report.held_since is not None
            if held:
                self._describe_hold(report)
                if report.more:
                    # The drain probes by itself; this only keeps one that ends at once from spinning.
                    await workflow.sleep(timedelta(seconds=1), summary="on hold")
            if report.more or self._woken:
                continue
            if not held:
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
            DrainInput(self.stage),
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
            f"its events wait in order, no attempt is spent; {self.events:,} events before"
        )

    def _describe(self, doing: str, waits: str | None = None) -> None:
        workflow.set_current_details(
            f"**{self.stage}** {doing} since {workflow.now():%Y-%m-%d %H:%M:%S} UTC\n\n"
            f"{self.events:,} events in {self.drains:,} drains before"
            + (f"\n\nas it came to rest, {waits}" if waits else "")
        )

"""The rebuild saga: pause, drain, fix what is expected, replay, reconcile, seal, reconcile again, activate.

Whatever ends it early (a difference, a bound that runs out, a cancel), the clean-up asks the database, which
alone knows whether the switch was made: then it is done; if not, the old generation stays and intake stays paused. An
activity that still runs then finds the rebuild over, and writes nothing.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, RetryState, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeout

from workflows.policies import ALIVE, DATABASE_RETRY, DATABASE_TIMEOUT

with workflow.unsafe.imports_passed_through():
    from activities.rebuilding import RebuildActivities
    from contracts.counts import counted
    from contracts.messages import RebuildInput, RebuildReport, RebuildStep, ReconcileReport


@workflow.defn
class RebuildWorkflow:
    """Makes a new generation of the sales totals, or brings a retired one up to date, and switches to it."""

    @workflow.init
    def __init__(self, message: RebuildInput) -> None:
        self._input = message
        self._rebuild_id = ""
        self._lines: list[str] = []
        self._proceed = not message.hold

    @workflow.run
    async def run(self, message: RebuildInput) -> RebuildReport:
        self._tell(f"{message.kind}: pausing intake")
        try:
            await self._begin(message)
            report = await self._steps()
        except (ActivityError, ApplicationError, asyncio.CancelledError) as error:
            report = await self._clean_up(error)
        await self._forget()
        return report

    @workflow.signal
    def proceed(self) -> None:
        """Go on, where it is held."""
        self._proceed = True

    async def _begin(self, message: RebuildInput) -> None:
        begin = asyncio.create_task(self._short(RebuildActivities.begin_rebuild, message, "pause intake"))
        try:
            begun: RebuildReport = await asyncio.shield(begin)
        except asyncio.CancelledError:
            # Its transaction may commit all the same: only its answer says what there is to clean up.
            self._rebuild_id = (await begin).rebuild_id
            raise
        self._rebuild_id = begun.rebuild_id
        self._tell(f"{begun.rebuild_id}: {begun.base_generation} -> {begun.generation}, intake paused")

    async def _steps(self) -> RebuildReport:
        self._tell("waiting until the outbox is drained")
        fixed = await self._long(
            RebuildActivities.await_drained,
            self._step(bound=self._input.drain_bound),
            "wait until drained, fix the expected set",
            self._input.drain_bound + self._input.phase_bound,
        )
        self._tell(f"drained; {counted(fixed.expected, 'order')} expected; replaying")
        replayed = await self._long(RebuildActivities.replay, self._step(), "replay the history")
        self._tell(f"{counted(replayed.replayed, 'event')} replayed; reconciling")
        first = await self._long(RebuildActivities.reconcile, self._step(), "reconcile")
        self._require_equal(first)
        await self._hold(first)
        self._tell(f"{counted(first.count, 'event')} equal by id and amount; sealing")
        await self._short(RebuildActivities.seal, self._step(), "seal against writes")
        self._tell("sealed; reading and reconciling again")
        second = await self._long(RebuildActivities.certify, self._step(), "reconcile again, certify")
        self._require_equal(second)
        self._tell(f"certified: {counted(second.count, 'event')}, digest {second.digest[:16]}...; activating")
        report: RebuildReport = await self._short(RebuildActivities.activate, self._step(), "activate")
        intake = "intake is open again" if self._input.resume else "intake stays paused until `intake resume`"
        self._tell(f"{report.generation} is active; {report.base_generation} is retired; {intake}")
        return report

    async def _hold(self, found: ReconcileReport) -> None:
        if self._proceed:
            return
        self._tell(f"{counted(found.count, 'event')} equal by id and amount; held until it is told to proceed")
        try:
            await workflow.wait_condition(
                lambda: self._proceed, timeout=self._input.phase_bound, timeout_summary="held, a drill"
            )
        except TimeoutError as error:
            raise ApplicationError("nobody told it to proceed within its bound", type="Held") from error

    async def _clean_up(self, error: BaseException) -> RebuildReport:
        reason = _reason(error)
        if not self._rebuild_id:
            raise ApplicationError(reason, type="Refused", non_retryable=True) from error
        self._tell(f"ending it: {reason}")
        report = await self._end(reason)
        if report.state == "COMPLETED":
            self._tell(f"{report.generation} is active: the switch was made before it was ended")
            return report
        self._tell(f"FAILED: {reason}; {report.base_generation} stays active, intake stays paused")
        await self._forget()
        if is_cancelled_exception(error):
            raise error
        raise ApplicationError(
            f"{self._rebuild_id} failed: {reason}; {report.base_generation} stays active and intake stays paused",
            report,
            type="RebuildFailed",
            non_retryable=True,
        ) from error

    async def _end(self, reason: str) -> RebuildReport:
        end = asyncio.create_task(
            self._short(RebuildActivities.fail_rebuild, self._step(error=reason), "end without a switch")
        )
        try:
            report: RebuildReport = await asyncio.shield(end)
        except asyncio.CancelledError:
            # A cancel that comes this late must not leave the rebuild as if it ran, nor hide why it failed.
            report = await end
        return report

    def _require_equal(self, report: ReconcileReport) -> None:
        if report.problems:
            raise ApplicationError(
                "the generation differs from the orders: " + "; ".join(report.problems),
                type="Mismatch",
                non_retryable=True,
            )

    async def _forget(self) -> None:
        try:
            await self._long(RebuildActivities.forget_expected, self._step(), "remove the expected set")
        except (ActivityError, asyncio.CancelledError):
            # Only room in the database: what the rebuild came to stands.
            workflow.logger.warning("the expected set of %s was not removed", self._rebuild_id)

    def _step(self, *, bound: float = 0.0, error: str = "") -> RebuildStep:
        return RebuildStep(self._rebuild_id, bound, error)

    async def _short(self, step: Callable[..., Any], message: Any, summary: str) -> Any:
        """One transaction; tried until the database is back."""
        return await workflow.execute_activity_method(
            step,
            message,
            start_to_close_timeout=DATABASE_TIMEOUT,
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            summary=summary,
        )

    async def _long(self, step: Callable[..., Any], message: Any, summary: str, bound: float | None = None) -> Any:
        """Many transactions, within a bound."""
        bound = self._input.phase_bound if bound is None else bound
        return await workflow.execute_activity_method(
            step,
            message,
            start_to_close_timeout=timedelta(seconds=bound),
            schedule_to_close_timeout=timedelta(seconds=bound),
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            summary=summary,
        )

    def _tell(self, line: str) -> None:
        self._lines.append(f"- {workflow.now():%H:%M:%S} UTC {line}")
        workflow.set_current_details("\n".join(self._lines))


def _reason(error: BaseException) -> str:
    if is_cancelled_exception(error):
        return "it was cancelled"
    cause = error.cause if isinstance(error, ActivityError) and error.cause else error
    message = getattr(cause, "message", None) or str(cause)
    if isinstance(cause, ActivityTimeout):
        return "a phase did not end within its bound"
    if isinstance(error, ActivityError) and error.retry_state == RetryState.TIMEOUT:
        return f"a phase did not end within its bound; it failed last with {message}"
    return message

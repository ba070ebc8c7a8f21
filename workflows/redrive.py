"""A redrive: the frozen set of one request becomes pending again, chunk by chunk; a cancel ends it between two."""

import asyncio

from temporalio import workflow

from workflows.policies import ALIVE, DATABASE_RETRY, DATABASE_TIMEOUT

with workflow.unsafe.imports_passed_through():
    from activities.redriving import RedriveActivities
    from contracts.counts import counted
    from contracts.messages import RedriveInput, RedriveReport
    from contracts.names import REDRIVE_COMPLETED, REDRIVE_RUNNING


@workflow.defn
class RedriveWorkflow:
    """Complete when every item of the set was taken. The counts are the database's, so a run that takes the place of a
    lost one goes on where that one was."""

    @workflow.init
    def __init__(self, message: RedriveInput) -> None:
        self._message = message
        self._report = RedriveReport(REDRIVE_RUNNING)

    @workflow.run
    async def run(self, message: RedriveInput) -> RedriveReport:
        self._describe()
        while self._report.state == REDRIVE_RUNNING:
            try:
                await self._take_chunk()
            except asyncio.CancelledError:
                await self._end()
                if self._report.state != REDRIVE_COMPLETED:  # the chunk at hand may have been the last one
                    raise
            if self._report.state == REDRIVE_RUNNING and workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(message)
        return self._report

    async def _take_chunk(self) -> None:
        done = self._report.taken + self._report.skipped
        chunk = workflow.start_activity_method(
            RedriveActivities.redrive_chunk,
            self._message,
            start_to_close_timeout=DATABASE_TIMEOUT,
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            summary=f"{self._message.request_id}: after the first {done:,}",
        )
        try:
            # The transaction at hand commits or not whatever we ask, so its outcome is waited for, and told.
            self._report = await asyncio.shield(chunk)
        except asyncio.CancelledError:
            self._report = await chunk
            raise
        finally:
            self._describe()

    async def _end(self) -> None:
        self._report = await workflow.execute_activity_method(
            RedriveActivities.cancel_redrive,
            self._message,
            start_to_close_timeout=DATABASE_TIMEOUT,
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            summary=f"record that {self._message.request_id} was cancelled",
        )
        self._describe()

    def _describe(self) -> None:
        report = self._report
        counts = f"{report.taken:,} of {counted(report.total, 'dead letter')} pending again, {report.skipped:,} skipped"
        workflow.set_current_details(
            f"**redrive {self._message.request_id}** {report.state.lower()}" + (f"\n\n{counts}" if report.total else "")
        )

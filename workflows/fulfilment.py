"""`charge`, then `ship`. A second run of the same job skips what is done, and says so.

Where all is well both steps are one local activity, which costs Temporal one decision instead of four. What it leaves
undone is tried by an activity a step, which shows its attempts and waits between them as long as it must. A job whose
attempts at shipping are counted (a drill) has an activity a step from the start.
"""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

from workflows.policies import (
    ALIVE,
    AT_ONCE_TIMEOUT,
    DATABASE_RETRY,
    DATABASE_TIMEOUT,
    ONCE,
    SHIP_PERIOD,
    SHIP_RETRY,
    STEP_TIMEOUT,
)

with workflow.unsafe.imports_passed_through():
    from activities.fulfilment import FulfilmentActivities
    from contracts.messages import FulfilmentInput, FulfilmentResult, StepInput


@workflow.defn
class FulfilmentWorkflow:
    """A resumable job. Fails with `StepFailed`, whose details hold the outcome of each step."""

    @workflow.run
    async def run(self, message: FulfilmentInput) -> FulfilmentResult:
        # A try at both steps would be one try more at shipping than was asked for.
        counted = message.ship_attempts > 0 and workflow.patched("attempts-are-counted")
        result = None if counted else await self._at_once(message)
        if result is not None and result.ship == "completed":
            workflow.set_current_details(f"{message.job_id}: charge {result.charge}, ship completed")
            return result
        charge = result.charge if result is not None else await self._charge(message)
        workflow.set_current_details(f"{message.job_id}: charge {charge}, shipping")
        try:
            await self._ship(message)
        except ActivityError as error:
            reason = str(error.cause) if error.cause else str(error)
            await self._end(message, f"ship failed: {reason}")
            raise ApplicationError(
                f"ship failed: {reason}; `job run {message.job_id}` resumes it",
                FulfilmentResult(charge, "failed"),
                type="StepFailed",
                non_retryable=True,
            ) from error
        await self._end(message, None)
        workflow.set_current_details(f"{message.job_id}: charge {charge}, ship completed")
        return FulfilmentResult(charge, "completed")

    async def _at_once(self, message: FulfilmentInput) -> FulfilmentResult | None:
        """What one try at both steps came to, or None when not even the charge went well."""
        try:
            return await workflow.execute_local_activity_method(
                FulfilmentActivities.fulfil,
                StepInput(message.job_id, message.amount, message.ship_fails),
                start_to_close_timeout=AT_ONCE_TIMEOUT,
                retry_policy=ONCE,
                summary=f"charge and ship {message.job_id}",
            )
        except FailureError as error:
            # Where nothing else wraps it, a local activity's own error comes as it is, and not as an ActivityError.
            if is_cancelled_exception(error):
                raise
            return None

    async def _charge(self, message: FulfilmentInput) -> str:
        return await workflow.execute_activity_method(
            FulfilmentActivities.charge,
            StepInput(message.job_id, message.amount),
            start_to_close_timeout=STEP_TIMEOUT,
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            summary=f"charge {message.job_id}",
        )

    async def _ship(self, message: FulfilmentInput) -> str:
        attempts = message.ship_attempts
        return await workflow.execute_activity_method(
            FulfilmentActivities.ship,
            StepInput(message.job_id, message.amount, message.ship_fails),
            start_to_close_timeout=STEP_TIMEOUT,
            heartbeat_timeout=ALIVE,
            schedule_to_close_timeout=SHIP_PERIOD,
            retry_policy=RetryPolicy(maximum_attempts=attempts) if attempts else SHIP_RETRY,
            summary=f"ship {message.job_id}",
        )

    async def _end(self, message: FulfilmentInput, error: str | None) -> None:
        await workflow.execute_activity_method(
            FulfilmentActivities.end_job,
            args=[message.job_id, error],
            start_to_close_timeout=DATABASE_TIMEOUT,
            heartbeat_timeout=ALIVE,
            retry_policy=DATABASE_RETRY,
            schedule_to_close_timeout=timedelta(days=30),
            summary=f"record the outcome of {message.job_id}",
        )

"""One event that failed at one receiver, as a run of its own: visible, retried, and a dead letter at the end."""

from temporalio import workflow

from workflows.policies import ALIVE, DATABASE_TIMEOUT, DELIVERY_RETRY, ONCE

with workflow.unsafe.imports_passed_through():
    from activities.delivering import DeliveryActivities
    from contracts.counts import counted
    from contracts.messages import DeliveryInput, DeliveryResult


@workflow.defn
class DeliveryWorkflow:
    """Retries until the delivery is settled; by hand it takes one attempt."""

    @workflow.run
    async def run(self, message: DeliveryInput) -> DeliveryResult:
        doing = "one attempt by hand" if message.manual else "failed, is tried again"
        workflow.set_current_details(
            f"{message.event_id} to {message.receiver}: {doing}"
            "\n\nthe attempt, the last failure and the next try stand under *Pending Activities*"
        )
        if message.manual:
            result = await workflow.execute_activity_method(
                DeliveryActivities.deliver_by_hand,
                message,
                start_to_close_timeout=DATABASE_TIMEOUT,
                heartbeat_timeout=ALIVE,
                retry_policy=ONCE,
                summary=f"{message.event_id} to {message.receiver}, by hand",
            )
        else:
            result = await workflow.execute_activity_method(
                DeliveryActivities.attempt_delivery,
                message,
                start_to_close_timeout=DATABASE_TIMEOUT,
                heartbeat_timeout=ALIVE,
                retry_policy=DELIVERY_RETRY,
                summary=f"{message.event_id} to {message.receiver}",
            )
        error = f": {result.error}" if result.error else ""
        workflow.set_current_details(
            f"{message.event_id} to {message.receiver}: {result.state} after "
            f"{counted(result.attempts, 'failed attempt')}{error}"
        )
        return result

"""What a careless change of DeliveryWorkflow may look like: it waits before the first attempt."""

from datetime import timedelta

from temporalio import workflow

from contracts.messages import DeliveryInput, DeliveryResult


@workflow.defn(name="DeliveryWorkflow")
class Hasty:
    """Its first command is a timer; the recorded runs scheduled an activity."""

    @workflow.run
    async def run(self, message: DeliveryInput) -> DeliveryResult:
        await workflow.sleep(timedelta(seconds=1))
        return DeliveryResult("done")

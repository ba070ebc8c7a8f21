"""The long-lived run of one receiver."""

from temporalio import workflow

from workflows.draining import DrainLoop

with workflow.unsafe.imports_passed_through():
    from contracts.messages import ReceiverInput
    from contracts.names import receiver_id


@workflow.defn
class ReceiverWorkflow:
    """Delivers pending events to one receiver, batch by batch."""

    @workflow.init
    def __init__(self, message: ReceiverInput) -> None:
        self._loop = DrainLoop(receiver_id(message.receiver), message.timings, message.drains, message.events)

    @workflow.run
    async def run(self, message: ReceiverInput) -> None:
        await self._loop.until_continue_as_new()
        workflow.continue_as_new(ReceiverInput(message.receiver, message.timings, self._loop.drains, self._loop.events))

    @workflow.signal
    def wake(self) -> None:
        """Deliveries are pending, or may be."""
        self._loop.wake()

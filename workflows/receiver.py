"""The long-lived run of one receiver."""

from temporalio import workflow

from workflows.draining import DrainLoop

with workflow.unsafe.imports_passed_through():
    from contracts.messages import ReceiverInput
    from contracts.names import receiver_id


@workflow.defn
class ReceiverWorkflow(DrainLoop):
    """Delivers pending events to one receiver, batch by batch."""

    @workflow.init
    def __init__(self, message: ReceiverInput) -> None:
        super().__init__(receiver_id(message.receiver), message)

    @workflow.run
    async def run(self, message: ReceiverInput) -> None:
        await self.drain_for_ever(message)

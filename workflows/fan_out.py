"""The fan-out's long-lived run."""

from temporalio import workflow

from workflows.draining import DrainLoop

with workflow.unsafe.imports_passed_through():
    from contracts.messages import StageInput
    from contracts.names import FAN_OUT_ID


@workflow.defn
class FanOutWorkflow(DrainLoop):
    """Makes deliveries of the entries in Redis."""

    @workflow.init
    def __init__(self, message: StageInput) -> None:
        super().__init__(FAN_OUT_ID, message)

    @workflow.run
    async def run(self, message: StageInput) -> None:
        await self.drain_for_ever(message)

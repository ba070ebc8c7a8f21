"""The relay's long-lived run."""

from temporalio import workflow

from workflows.draining import DrainLoop

with workflow.unsafe.imports_passed_through():
    from contracts.messages import StageInput
    from contracts.names import RELAY_ID


@workflow.defn
class RelayWorkflow(DrainLoop):
    """Moves events from the outbox to Redis."""

    @workflow.init
    def __init__(self, message: StageInput) -> None:
        super().__init__(RELAY_ID, message)

    @workflow.run
    async def run(self, message: StageInput) -> None:
        await self.drain_for_ever(message)

"""The relay's long-lived run."""

from temporalio import workflow

from workflows.draining import DrainLoop

with workflow.unsafe.imports_passed_through():
    from contracts.messages import StageInput
    from contracts.names import RELAY_ID


@workflow.defn
class RelayWorkflow:
    """Moves events from the outbox to Redis."""

    @workflow.init
    def __init__(self, message: StageInput) -> None:
        self._loop = DrainLoop(RELAY_ID, message.timings, message.drains, message.events)

    @workflow.run
    async def run(self, message: StageInput) -> None:
        await self._loop.until_continue_as_new()
        workflow.continue_as_new(StageInput(message.timings, self._loop.drains, self._loop.events))

    @workflow.signal
    def wake(self) -> None:
        """An order was placed, or work was found."""
        self._loop.wake()

"""The floor of `jobs`: a workflow of two steps that do nothing, as cheap as Temporal has them."""

from datetime import timedelta

from temporalio import activity, workflow


@activity.defn
async def nothing() -> None:
    """Does nothing."""


@workflow.defn
class BareWorkflow:
    """Two local steps."""

    @workflow.run
    async def run(self) -> None:
        for _ in range(2):
            await workflow.execute_local_activity(nothing, start_to_close_timeout=timedelta(seconds=10))

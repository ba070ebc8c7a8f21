"""Starting and waking runs. Every run has a fixed id, so starting it twice comes to one run.

Workflows are named by their type's name here: this side may live in a process that has no workflow code.
"""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.service import RPCError, RPCStatusCode

from contracts import names, search
from contracts.identifiers import job_aggregate
from contracts.messages import (
    DeliveryInput,
    FulfilmentInput,
    RebuildInput,
    ReceiverInput,
    RedriveInput,
    StageInput,
    Timings,
)

_RPC_TIMEOUT = timedelta(seconds=5)
# A decision takes milliseconds; one that a worker took with it when it died or was stopped is given to another after
# this long, and not after the default of 10 s.
_TASK_TIMEOUT = timedelta(seconds=3)
# A job's first decision holds both its steps: fifty at once on a slow disk take longer than that.
_JOB_TASK_TIMEOUT = timedelta(seconds=10)

# A run that continues as new loses its static summary and keeps its memo, so the Web UI shows there what it is for.
_MEMO = "summary"

# Stage -> its workflow, and what its runs are for.
_PIPELINE = {
    names.RELAY_ID: ("RelayWorkflow", "outbox to Redis"),
    names.FAN_OUT_ID: ("FanOutWorkflow", "Redis to deliveries"),
}


class Runs:
    """Starts runs through one client."""

    def __init__(self, client: Client, receivers: Sequence[str], timings: Timings | None = None) -> None:
        """`receivers`: the names whose singletons belong to the pipeline."""
        self.client = client
        self._receivers = tuple(receivers)
        self._timings = timings or Timings()

    @property
    def stages(self) -> tuple[str, ...]:
        """Ids of the pipeline's long-lived runs, in the order of the flow."""
        return (names.RELAY_ID, names.FAN_OUT_ID, *(names.receiver_id(name) for name in self._receivers))

    async def wake(self, stages: Iterable[str] | None = None) -> None:
        """Signal these stages, and start the ones that are not running. The relay alone if not said: whoever drains it
        wakes the stages that it hands work to. Raises RPCError or RuntimeError of the client when Temporal does not
        answer."""
        await asyncio.gather(*(self._start_stage(stage, wake=True) for stage in stages or [names.RELAY_ID]))

    async def ensure(self) -> None:
        """Start the stages that are not running; the others notice nothing."""
        await asyncio.gather(*(self._start_stage(stage, wake=False) for stage in self.stages))

    async def end_stage(self, stage: str, reason: str) -> bool:
        """End the long-lived run of a stage that there is no more; whether there was one. Raises RPCError or
        RuntimeError of the client when Temporal does not answer."""
        try:
            await self.client.get_workflow_handle(stage).terminate(reason=reason, rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        return True

    async def start_delivery(self, message: DeliveryInput) -> WorkflowHandle[Any, Any]:
        """The run that delivers one event to one receiver. A run by hand has an id of its own kind, so that it never
        takes the place of the retrying one."""
        workflow_id = names.delivery_id(message.receiver, message.event_id)
        return await self._start(
            "DeliveryWorkflow",
            message,
            f"{workflow_id}/manual" if message.manual else workflow_id,
            f"{message.event_id} to {message.receiver}",
            SearchAttributePair(search.RECEIVER, message.receiver),
            SearchAttributePair(search.AGGREGATE_ID, message.aggregate_id),
        )

    async def start_job(self, message: FulfilmentInput) -> WorkflowHandle[Any, Any]:
        """The run of a job whose row is written; attaches to the one that is open."""
        return await self._start(
            "FulfilmentWorkflow",
            message,
            names.job_workflow_id(message.job_id),
            f"charge and ship {message.job_id}",
            SearchAttributePair(search.JOB, message.job_id),
            SearchAttributePair(search.AGGREGATE_ID, job_aggregate(message.job_id)),
            # Its first decision comes with the answer where this process has a worker.
            request_eager_start=True,
            task_timeout=_JOB_TASK_TIMEOUT,
        )

    async def start_redrive(self, request_id: str, receiver: str | None) -> WorkflowHandle[Any, Any]:
        """The run of a redrive whose set is frozen; attaches to the one that is open."""
        return await self._start(
            "RedriveWorkflow",
            RedriveInput(request_id, receiver),
            names.redrive_id(request_id),
            f"redrive {request_id}" + (f" at {receiver}" if receiver else ""),
            *([SearchAttributePair(search.RECEIVER, receiver)] if receiver else []),
            continues=True,
        )

    async def start_rebuild(self, message: RebuildInput) -> WorkflowHandle[Any, Any]:
        """The rebuild's run. Raises WorkflowAlreadyStartedError while one runs."""
        return await self._start(
            "RebuildWorkflow",
            message,
            names.REBUILD_ID,
            f"{message.kind} of the sales totals",
            SearchAttributePair(search.RECEIVER, "sales"),
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
        )

    async def _start_stage(self, stage: str, *, wake: bool) -> None:
        signal = names.WAKE_SIGNAL if wake else None
        receiver = names.receiver_of(stage)
        if receiver is not None:
            await self._start(
                "ReceiverWorkflow",
                ReceiverInput(receiver, self._timings),
                stage,
                f"deliveries to {receiver}",
                SearchAttributePair(search.RECEIVER, receiver),
                continues=True,
                start_signal=signal,
            )
            return
        workflow, summary = _PIPELINE[stage]
        await self._start(workflow, StageInput(self._timings), stage, summary, continues=True, start_signal=signal)

    async def _start(
        self,
        workflow: str,
        message: Any,
        workflow_id: str,
        summary: str,
        *attributes: SearchAttributePair[str],
        id_conflict_policy: WorkflowIDConflictPolicy = WorkflowIDConflictPolicy.USE_EXISTING,
        continues: bool = False,
        start_signal: str | None = None,
        task_timeout: timedelta = _TASK_TIMEOUT,
        request_eager_start: bool = False,
    ) -> WorkflowHandle[Any, Any]:
        """The run of that id. A policy each is said for one that is open and for one that has ended: what the server
        does by itself is for it to change. `continues`: it may continue as new."""
        return await self.client.start_workflow(
            workflow,
            message,
            id=workflow_id,
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=id_conflict_policy,
            start_signal=start_signal,
            static_summary=summary,
            memo={_MEMO: summary} if continues else None,
            search_attributes=TypedSearchAttributes(attributes),
            request_eager_start=request_eager_start,
            task_timeout=task_timeout,
            rpc_timeout=_RPC_TIMEOUT,
        )

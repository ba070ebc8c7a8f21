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
        """Signal these stages (all if not said), and start the ones that are not running. Raises RPCError or
        RuntimeError of the client when Temporal does not answer."""
        await asyncio.gather(*(self._start_stage(stage, wake=True) for stage in stages or self.stages))

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
        return await self.client.start_workflow(
            "DeliveryWorkflow",
            message,
            id=f"{workflow_id}/manual" if message.manual else workflow_id,
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"{message.event_id} to {message.receiver}",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(search.RECEIVER, message.receiver),
                    SearchAttributePair(search.AGGREGATE_ID, message.aggregate_id),
                ]
            ),
            task_timeout=_TASK_TIMEOUT,
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def start_job(self, message: FulfilmentInput) -> WorkflowHandle[Any, Any]:
        """The run of a job whose row is written; attaches to the one that is open."""
        return await self.client.start_workflow(
            "FulfilmentWorkflow",
            message,
            id=names.job_workflow_id(message.job_id),
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"charge and ship {message.job_id}",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(search.JOB, message.job_id),
                    SearchAttributePair(search.AGGREGATE_ID, job_aggregate(message.job_id)),
                ]
            ),
            # Its first decision comes with the answer where this process has a worker.
            request_eager_start=True,
            task_timeout=_JOB_TASK_TIMEOUT,
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def start_redrive(self, request_id: str, receiver: str | None) -> WorkflowHandle[Any, Any]:
        """The run of a redrive whose set is frozen; attaches to the one that is open."""
        attributes = [SearchAttributePair(search.RECEIVER, receiver)] if receiver else []
        return await self.client.start_workflow(
            "RedriveWorkflow",
            RedriveInput(request_id, receiver, self._timings),
            id=names.redrive_id(request_id),
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"redrive {request_id}" + (f" at {receiver}" if receiver else ""),
            search_attributes=TypedSearchAttributes(attributes),
            rpc_timeout=_RPC_TIMEOUT,
            task_timeout=_TASK_TIMEOUT,
        )

    async def start_rebuild(self, message: RebuildInput) -> WorkflowHandle[Any, Any]:
        """The rebuild's run. Raises WorkflowAlreadyStartedError while one runs."""
        return await self.client.start_workflow(
            "RebuildWorkflow",
            message,
            id=names.REBUILD_ID,
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"{message.kind} of the sales totals",
            search_attributes=TypedSearchAttributes([SearchAttributePair(search.RECEIVER, "sales")]),
            task_timeout=_TASK_TIMEOUT,
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def _start_stage(self, stage: str, *, wake: bool) -> None:
        workflow, argument, summary, attributes = self._stage(stage)
        await self.client.start_workflow(
            workflow,
            argument,
            id=stage,
            task_queue=names.TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            start_signal=names.WAKE_SIGNAL if wake else None,
            static_summary=summary,
            search_attributes=attributes,
            task_timeout=_TASK_TIMEOUT,
            rpc_timeout=_RPC_TIMEOUT,
        )

    def _stage(self, stage: str) -> tuple[str, Any, str, TypedSearchAttributes]:
        if stage == names.RELAY_ID:
            return "RelayWorkflow", StageInput(self._timings), "outbox to Redis", TypedSearchAttributes.empty
        if stage == names.FAN_OUT_ID:
            return "FanOutWorkflow", StageInput(self._timings), "Redis to deliveries", TypedSearchAttributes.empty
        receiver = names.receiver_of(stage) or stage
        return (
            "ReceiverWorkflow",
            ReceiverInput(receiver, self._timings),
            f"deliveries to {receiver}",
            TypedSearchAttributes([SearchAttributePair(search.RECEIVER, receiver)]),
        )

"""Whether workers and long-lived runs are there, as Temporal sees it."""

import asyncio
import time
from collections.abc import Sequence

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import TaskQueueType, WorkflowExecutionStatus
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts.names import DRAIN_TASK_QUEUE, RELAY_ID, TASK_QUEUE

_PATIENCE = 3.0  # seconds
# A poll lasts a minute, and Temporal names a poller for five after its last one.
_FRESH = 90.0

_QUEUES = (
    (TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    (TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    (DRAIN_TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
)


async def worker_answers(client: Client) -> bool:
    """Whether a worker answers a question within 3 seconds (every run can be asked for its description)."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await client.get_workflow_handle(RELAY_ID).query("__temporal_workflow_metadata")
    except (RPCError, TimeoutError):
        return False
    return True


async def unpolled_queues(client: Client) -> list[str]:
    """The task queues of ours that no worker has asked for work lately. Raises RPCError, TimeoutError after 3 s."""
    oldest = time.time() - _FRESH
    found = []
    async with asyncio.timeout(_PATIENCE):
        for name, kind in _QUEUES:
            described = await client.workflow_service.describe_task_queue(
                DescribeTaskQueueRequest(
                    namespace=client.namespace, task_queue=TaskQueue(name=name), task_queue_type=kind
                )
            )
            if not any(poller.last_access_time.ToDatetime().timestamp() > oldest for poller in described.pollers):
                found.append(name)
    return sorted(set(found))


async def first_runs(client: Client, workflow_ids: Sequence[str]) -> tuple[list[str | None], bool]:
    """The first run of each of these chains (None where there is none), and whether all of them are running.

    Asked every few seconds for as long as a worker lives: the client's own description reads the answer apart, memo,
    search attributes and all, which took the worker as long as all the rest of its look.
    """
    found = await asyncio.gather(*(_first_run(client, workflow_id) for workflow_id in workflow_ids))
    return [first for first, _ in found], all(running for _, running in found)


async def _first_run(client: Client, workflow_id: str) -> tuple[str | None, bool]:
    execution = WorkflowExecution(workflow_id=workflow_id)
    request = DescribeWorkflowExecutionRequest(namespace=client.namespace, execution=execution)
    try:
        described = await client.workflow_service.describe_workflow_execution(request, retry=True)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None, False
        raise
    info = described.workflow_execution_info
    return info.first_run_id, info.status == WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING

"""Waiting for a run's result while telling the person what it waits for."""

import asyncio
from dataclasses import dataclass
from typing import Any

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowHandle
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.service import RPCError

from commands.context import Context
from contracts.counts import counted

_QUIET = 1.5  # seconds without a word: most runs are done by then
_EVERY = 1.0


async def result_of(context: Context, handle: WorkflowHandle[Any, Any]) -> Any:
    """The run's result; what it waits for is told on stderr whenever that changes. Raises WorkflowFailureError."""
    result = asyncio.ensure_future(handle.result())
    try:
        pause, said = _QUIET, None
        while not (await asyncio.wait([result], timeout=pause))[0]:
            pause = _EVERY
            now = await standing(handle)
            if now is not None and now != said:
                said = now
                context.say(f"{handle.id}: {now}")
        return result.result()
    except asyncio.CancelledError:
        context.say(f"{handle.id}: goes on without this command")
        raise
    finally:
        result.cancel()


@dataclass(frozen=True)
class Failure:
    """Why a run failed: the kind and text of its innermost application error, and the details of the outermost."""

    kind: str | None
    text: str
    details: tuple[Any, ...]


def failure(error: BaseException) -> Failure:
    """What is behind a WorkflowFailureError."""
    details: tuple[Any, ...] = ()
    inner = error
    while inner.__cause__ is not None and isinstance(inner.__cause__, FailureError):
        inner = inner.__cause__
        if isinstance(inner, ApplicationError) and not details:
            details = tuple(inner.details)
    kind = inner.type if isinstance(inner, ApplicationError) else None
    return Failure(kind, getattr(inner, "message", None) or str(inner), details)


async def standing(handle: WorkflowHandle[Any, Any]) -> str | None:
    """What the run waits for or does, in a few words, or None where that cannot be told."""
    try:
        pending = (await handle.describe()).raw_description
    except RPCError:
        return None
    for activity in pending.pending_activities:
        name = activity.activity_type.name
        if activity.attempt > 1:
            why = activity.last_failure.message
            return f"{name} failed, {counted(activity.attempt - 1, 'time')} so far ({why}); it is tried again"
        if activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
            return f"{name} waits for a worker; `make up` starts one"
        return f"{name} is under way"
    return "waits for a worker; `make up` starts one" if pending.HasField("pending_workflow_task") else None

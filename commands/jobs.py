"""`job run` and `job show`. The job's row is written before its run starts, so a job outlives a lost Temporal."""

from argparse import Namespace
from typing import Any

from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode

from commands.context import Context
from commands.parsing import Commands, command, integer
from commands.telling import AWAY, later
from commands.waiting import failure, result_of
from contracts.errors import Refused, Unreachable
from contracts.identifiers import require_id
from contracts.messages import FulfilmentInput
from contracts.names import job_workflow_id
from contracts.orders import require_amount
from runs.starts import Runs
from store.clock import iso, now_ms
from store.jobs import JOB_LOOK_MS, begin_job, get_job


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("job")
    run = command(
        group, "run", _run, "run a job, or resume it where it stopped", "starter.py job run job-1 --amount 100"
    )
    run.add_argument("job", metavar="JOB", help="the job's id")
    run.add_argument("--amount", type=integer, default=100, help="minor units to charge (100 if not said)")
    run.add_argument("--ship-fails", action="store_true", help="a drill: shipping fails at its only attempt")
    run.add_argument(
        "--no-wait", action="store_true", help="start it and return, without its outcome (0 once the job is durable)"
    )
    show = command(group, "show", _show, "show a job, its steps and its charge", "starter.py job show job-1")
    show.add_argument("job", metavar="JOB", help="the job's id")


async def _run(context: Context, args: Namespace) -> int:
    job = require_id(args.job, "JOB")
    amount = require_amount(args.amount)
    database = context.database
    if args.ship_fails and await _is_open(await context.runs(), job):
        raise Refused(f"job {job} has a run that is open, which a drill would not reach; let it end first")
    with database.write() as connection:
        now = now_ms()
        begin_job(connection, job, amount, now, now + JOB_LOOK_MS)
    try:
        runs = await context.runs()
        attached = await _is_open(runs, job)
        message = FulfilmentInput(job, amount, ship_fails=args.ship_fails, ship_attempts=1 if args.ship_fails else 0)
        handle = await runs.start_job(message)
    except AWAY as error:
        if args.no_wait:
            # As an order that is placed meanwhile: what was asked for is durable, and the worker's look starts it.
            context.say(later(error))
            if context.json:
                context.result({"job": job, "started": False, "link": None})
            else:
                context.line(f"job {job} is recorded")
            return 0
        raise Unreachable(later(error)) from error
    if args.no_wait:
        _tell_started(context, job, attached)
        return 0
    if attached:
        context.say(f"job {job} has a run already; waiting for it")
    try:
        outcome = await result_of(context, handle)
    except WorkflowFailureError as error:
        why = failure(error)
        if not why.details or not isinstance(why.details[0], dict):
            raise Refused(
                f"the run of job {job} ended without an outcome ({why.text}); `job run {job}` resumes it"
            ) from error
        outcome = why.details[0]
        context.say(f"ship failed: {why.text}; `job run {job}` resumes it")
    _print_outcome(context, job, amount, outcome)
    return 0 if outcome["ship"] == "completed" else 1


async def _is_open(runs: Runs, job: str) -> bool:
    try:
        status = (await runs.client.get_workflow_handle(job_workflow_id(job)).describe()).status
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return status is WorkflowExecutionStatus.RUNNING


def _tell_started(context: Context, job: str, attached: bool) -> None:
    if context.json:
        context.result({"job": job, "started": not attached, "link": _link(context, job)})
    else:
        context.line(f"job {job} {'has a run already' if attached else 'is started'}")


def _print_outcome(context: Context, job: str, amount: int, outcome: dict[str, str]) -> None:
    if context.json:
        context.result(
            {
                "job": job,
                "amount": amount,
                "charge": outcome["charge"],
                "ship": outcome["ship"],
                "link": _link(context, job),
            }
        )
    else:
        context.line(f"charge={outcome['charge']}")
        context.line(f"ship={outcome['ship']}")


def _link(context: Context, job: str) -> str | None:
    return context.links.workflow(job_workflow_id(job)) if context.links else None


async def _show(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        job = get_job(connection, args.job)
    document: dict[str, Any] = {
        "job": job.job_id,
        "amount": job.amount,
        "state": job.state,
        "error": job.error,
        "created_at": iso(job.created_at),
        "steps": list(job.steps),
        "charges": [{"job": charged, "amount": amount} for charged, amount in job.charges],
        "link": _link(context, job.job_id),
    }
    if context.json:
        context.result(document)
    else:
        charges = ", ".join(str(charge["amount"]) for charge in document["charges"])
        context.fields({**document, "steps": ", ".join(job.steps), "charges": charges})
    return 0

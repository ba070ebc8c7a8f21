"""Deliveries and resumption: each receiver has its own state of an event, and a job that failed midway goes on.

The pipeline's own relay and fan-out register the deliveries; no receiver drains, so that each step is taken by hand,
by one run. Every line is what the database or a run said; the verdict compares it with what must be there.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError

from contracts.errors import InvalidInput
from contracts.events import ORDER_PLACED
from contracts.identifiers import order_aggregate, order_shipped_id, payment_captured_id, require_id
from contracts.messages import DeliveryInput, DeliveryResult, FulfilmentInput, FulfilmentResult
from contracts.names import CHARGE, SHIP
from contracts.orders import Order, require_amount
from labs.scratch import Scratch, scratch_worker
from labs.verdict import LabFailed, Verdict
from receivers.builtin import Billing, Mail
from store.clock import now_ms
from store.deliveries import DONE, PENDING, Delivery, deliveries_of
from store.jobs import Job, begin_job, get_job
from store.orders import record_order
from store.outbox import OutboxRow, append_event, find_event, publish_again
from store.schema import PUBLISHED
from store.status import count_orders, effect_counts
from worker import SaiseiWorker

_PATIENCE = 60.0  # seconds for one step, on a machine that is busy with something else
_JOB_GRACE_MS = 60_000  # the look leaves the job alone for as long as a run of this walk-through may take


@dataclass(frozen=True)
class Plan:
    """The names and the sum."""

    event: str = "order-7"
    job: str = "job-1"
    amount: int = 100

    def checked(self) -> "Plan":
        """Itself. Raises InvalidInput that names each unusable field."""
        require_id(self.event, "event")
        require_id(self.job, "job")
        require_amount(self.amount)
        if self.event in (payment_captured_id(self.job), order_shipped_id(self.job)):
            raise InvalidInput({"event": "is the id of one of the job's own events; choose another name"})
        return self


async def walk(plan: Plan, scratch: Scratch, line: Callable[[str], None]) -> Verdict:
    """Take all steps on `scratch`; each line of the transcript goes to `line` as it comes to be.

    Raises LabFailed when a step comes to no end.
    """
    receivers = (Billing(), Mail())
    async with scratch_worker(scratch, receivers, draining=()) as worker:
        steps = _Steps(plan, worker, line)
        try:
            await steps.deliver()
            await steps.resume()
        except TimeoutError:
            raise LabFailed(f"{steps.doing} took longer than {_PATIENCE:g} s; is the machine overloaded?") from None
        return steps.verdict


@dataclass
class _Steps:
    plan: Plan
    worker: SaiseiWorker
    line: Callable[[str], None]
    verdict: Verdict = field(default_factory=lambda: Verdict("delivery"))
    doing: str = ""

    async def deliver(self) -> None:
        """One event, two receivers: one of them fails, and only that one is taken again."""
        await self.worker.writer.write(self._place)
        await self._through_the_pipeline("the first publish")
        await self._show_deliveries(billing=PENDING, mail=PENDING)

        self._require_success("billing", await self._consume("billing"))
        before = await self._delivery("mail")
        failure = await self._consume("mail", fail=True)
        await self._show_deliveries(billing=DONE, mail=PENDING)
        self._show_failure(before, await self._delivery("mail"), failure)

        await self.worker.writer.write(lambda connection: publish_again(connection, self.plan.event))
        await self._through_the_pipeline("the second publish")
        await self._show_deliveries(billing=DONE, mail=PENDING)

        self._require_success("mail", await self._consume("mail"))
        await self._show_deliveries(billing=DONE, mail=DONE)
        effects = await self.worker.writer.read(effect_counts)
        self.verdict.require(
            effects == {"billing": 1, "mail": 1}, f"each receiver must have taken the event once, but wrote {effects}"
        )

    async def resume(self) -> None:
        """A job whose shipping fails is charged once, however often it runs again."""
        await self._run_job(ship_fails=True, expect=FulfilmentResult("committed", "failed"), steps=(CHARGE,))
        for _ in range(2):
            await self._run_job(
                ship_fails=False, expect=FulfilmentResult("already_completed", "completed"), steps=(CHARGE, SHIP)
            )
        orders = await self.worker.writer.read(count_orders)
        self.verdict.counts = {"orders": orders, "deliveries": len(await self._deliveries())}
        self.verdict.reason = "each receiver took the event once; the job was charged once over three runs"

    def _place(self, connection: Connection) -> None:
        """The order and its event in one transaction. The event bears the name itself, as the walk-through shows it."""
        order = Order(self.plan.event, "sku-7", 1, self.plan.amount, "JPY")
        record_order(connection, order, now_ms())
        append_event(
            connection,
            event_id=self.plan.event,
            aggregate_id=order_aggregate(order.id),
            event_type=ORDER_PLACED,
            payload=order.payload(),
        )

    async def _through_the_pipeline(self, doing: str) -> None:
        """Wake relay and fan-out, and wait until the event has its deliveries."""
        self.doing = doing
        await self.worker.runs.wake()
        async with asyncio.timeout(_PATIENCE):
            while True:
                row = await self.worker.writer.read(self._event)
                if row.status == PUBLISHED and row.fanned_out_at is not None:
                    return
                await asyncio.sleep(0.01)

    def _event(self, connection: Connection) -> OutboxRow:
        return find_event(connection, self.plan.event)

    async def _deliveries(self) -> list[Delivery]:
        return await self.worker.writer.read(lambda connection: deliveries_of(connection, self.plan.event))

    async def _delivery(self, receiver: str) -> Delivery:
        return next(delivery for delivery in await self._deliveries() if delivery.receiver == receiver)

    async def _show_deliveries(self, **expected: str) -> None:
        deliveries = await self._deliveries()
        rows = [(delivery.receiver, delivery.event.event_id, delivery.status) for delivery in deliveries]
        self.line(repr(rows))
        wanted = [(receiver, self.plan.event, state) for receiver, state in expected.items()]
        self.verdict.require(rows == wanted, f"the deliveries must be {wanted}, but are {rows}")

    async def _consume(self, receiver: str, *, fail: bool = False) -> DeliveryResult | ApplicationError:
        """One attempt at the receiver by a run of its own: its result, or why it failed."""
        self.doing = f"delivering to {receiver}"
        message = DeliveryInput(receiver, self.plan.event, order_aggregate(self.plan.event), manual=True, fail=fail)
        handle = await self.worker.runs.start_delivery(message)
        try:
            result: DeliveryResult = await self._result(handle, DeliveryResult)
        except WorkflowFailureError as error:
            return _application_error(error)
        return result

    def _require_success(self, receiver: str, outcome: DeliveryResult | ApplicationError) -> None:
        said = outcome.message if isinstance(outcome, ApplicationError) else outcome.state
        self.verdict.require(said == DONE, f"{receiver} must have taken the event, but its run said: {said}")

    def _show_failure(self, before: Delivery, after: Delivery, outcome: DeliveryResult | ApplicationError) -> None:
        failed = isinstance(outcome, ApplicationError) and outcome.type == "ReceiverFailed"
        retained = before == after
        self.line(
            f"{after.receiver}: {'failed' if failed else 'not failed'}; "
            f"{after.status} {'retained' if retained else 'changed'}"
        )
        self.verdict.require(failed, f"{after.receiver} was told to fail, but its run said: {outcome}")
        self.verdict.require(
            retained, f"a failure by hand must leave the delivery as it was ({before.status}), but it is {after.status}"
        )

    async def _run_job(self, *, ship_fails: bool, expect: FulfilmentResult, steps: Sequence[str]) -> None:
        plan = self.plan
        self.doing = f"running {plan.job}"
        now = now_ms()
        await self.worker.writer.write(
            lambda connection: begin_job(connection, plan.job, plan.amount, now, now + _JOB_GRACE_MS)
        )
        handle = await self.worker.runs.start_job(
            FulfilmentInput(plan.job, plan.amount, ship_fails=ship_fails, ship_attempts=1)
        )
        try:
            result: FulfilmentResult = await self._result(handle, FulfilmentResult)
        except WorkflowFailureError as error:
            result = _outcome_of_failed_job(error)
        job: Job = await self.worker.writer.read(lambda connection: get_job(connection, plan.job))
        self.line(f"charge={result.charge}")
        self.line(f"ship={result.ship}")
        self.line(f"steps={[(job.job_id, step) for step in job.steps]}")
        self.line(f"charges={list(job.charges)}")
        self.verdict.require(result == expect, f"the run must have said {expect}, but said {result}")
        self.verdict.require(
            job.steps == tuple(steps), f"{plan.job} must have completed {list(steps)}, but has {list(job.steps)}"
        )
        self.verdict.require(
            job.charges == ((plan.job, plan.amount),),
            f"{plan.job} must be charged {plan.amount} once, but has {list(job.charges)}",
        )

    async def _result(self, handle: WorkflowHandle[Any, Any], kind: type[Any]) -> Any:
        typed = self.worker.runs.client.get_workflow_handle(handle.id, run_id=handle.result_run_id, result_type=kind)
        async with asyncio.timeout(_PATIENCE):
            return await typed.result()


def _application_error(error: WorkflowFailureError) -> ApplicationError:
    """Why the run failed. Raises LabFailed when it is not a failure that an activity or the workflow meant."""
    cause: BaseException | None = error.cause
    if isinstance(cause, ActivityError):
        cause = cause.cause
    if isinstance(cause, ApplicationError):
        return cause
    raise LabFailed(f"a run failed in a way that no step foresees: {cause or error}") from error


def _outcome_of_failed_job(error: WorkflowFailureError) -> FulfilmentResult:
    cause = _application_error(error)
    if not cause.details:
        raise LabFailed(f"the job's run failed in another way than it should: {cause.message}") from error
    return FulfilmentResult(**cause.details[0])

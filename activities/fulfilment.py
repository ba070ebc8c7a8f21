"""The steps of a job: each is skipped when it is recorded, and recorded in the transaction of its effect."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.errors import NotFound
from contracts.identifiers import job_aggregate
from contracts.messages import FulfilmentResult, StepInput
from contracts.names import CHARGE, SHIP
from pipeline.writer import Writer
from store.clock import now_ms
from store.jobs import (
    complete_charge,
    complete_ship,
    completed_steps,
    end_job,
    write_charge,
    write_shipment,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMITTED, ALREADY_COMPLETED = "committed", "already_completed"


class PaymentSide(ABC):
    """Who takes the money. A provider outside is asked by a `request`: it is called in no transaction, possibly more
    than once, with a key that is the same at every retry of the job, which the provider must honour. `record` then
    writes the charge in the transaction that completes the step."""

    # Asks the provider for an amount (minor units) under the idempotency key: a method of who has one to ask.
    request: Callable[[str, int], None] | None = None

    @abstractmethod
    def record(self, connection: Connection, job_id: str, amount: int, now: int) -> None:
        """Write the charge; `now` in UTC ms."""


class ShippingSide(ABC):
    """Who sends the goods; as PaymentSide."""

    # Asks the carrier under the idempotency key: a method of who has one to ask.
    request: Callable[[str], None] | None = None

    @abstractmethod
    def record(self, connection: Connection, job_id: str, now: int) -> None:
        """Write the shipment; `now` in UTC ms."""


class OwnPayments(PaymentSide):
    """The built-in side: a row of our own."""

    def record(self, connection: Connection, job_id: str, amount: int, now: int) -> None:
        write_charge(connection, job_id, amount, now)


class OwnShipping(ShippingSide):
    """The built-in side: a row of our own."""

    def record(self, connection: Connection, job_id: str, now: int) -> None:
        write_shipment(connection, job_id, now)


class FulfilmentActivities:
    """`charge`, `ship` and the end of a job."""

    def __init__(self, writer: Writer, payments: PaymentSide, shipping: ShippingSide) -> None:
        self._writer = writer
        self._payments = payments
        self._shipping = shipping

    @activity.defn
    async def fulfil(self, message: StepInput) -> FulfilmentResult:
        """Both steps, one after the other, and the end of the job: the short way of a job with which all is well.

        `ship` is `failed` when the charge is recorded and the goods were not sent; that step is then to be tried with
        all its patience. Raises what kept the charge from being recorded.
        """
        if self._payments.request is None and self._carrier(message) is None:
            # Nobody outside hears of either: one commit holds both, and neither is ever there without the other.
            return await self._write(self._record_both, message)
        charge = await self.charge(message)  # durable before anybody hears of the shipment
        try:
            await self._ship(message, ended=True)
        except Exception as error:
            logger.info("shipping of %s is left to its own activity: %s", message.job_id, error)
            return FulfilmentResult(charge, "failed")
        return FulfilmentResult(charge, "completed")

    @activity.defn
    async def charge(self, message: StepInput) -> str:
        """`committed`, or `already_completed` when the job was charged before."""
        await self._ask_payments(message)
        return await self._write(self._record_charge, message)

    @activity.defn
    async def ship(self, message: StepInput) -> str:
        """`committed`, or `already_completed` when the job was shipped before.

        Raises ApplicationError `ShippingFailed` when it was told to fail.
        """
        return await self._ship(message, ended=False)

    @activity.defn
    async def end_job(self, job_id: str, error: str | None) -> None:
        """Write the outcome into the job's row."""
        await self._writer.write(lambda connection: end_job(connection, job_id, error))

    async def _ship(self, message: StepInput, *, ended: bool) -> str:
        """`ended`: the job's outcome is written in the same transaction."""
        request = self._carrier(message)
        if request is not None and not await self._is_done(message.job_id, SHIP):
            await self._writer.call(partial(request, f"{job_aggregate(message.job_id)}/ship"))
        return await self._write(partial(self._record_shipment, ended=ended), message)

    def _carrier(self, message: StepInput) -> Callable[[str], None] | None:
        """Who outside is asked to ship, if anybody; in a drill, one who refuses."""
        return partial(_refuse, message.job_id) if message.fails else self._shipping.request

    async def _ask_payments(self, message: StepInput) -> None:
        request = self._payments.request
        if request is not None and not await self._is_done(message.job_id, CHARGE):
            await self._writer.call(partial(request, f"{job_aggregate(message.job_id)}/charge", message.amount))

    async def _is_done(self, job_id: str, step: str) -> bool:
        with _no_such_job():
            return step in await self._writer.read(lambda connection: completed_steps(connection, job_id, lock=False))

    async def _write(self, record: Callable[[StepInput, Connection], T], message: StepInput) -> T:
        with _no_such_job():
            return await self._writer.write(partial(record, message))

    def _record_both(self, message: StepInput, connection: Connection) -> FulfilmentResult:
        charge = self._record_charge(message, connection)
        self._record_shipment(message, connection, ended=True)
        return FulfilmentResult(charge, "completed")

    def _record_charge(self, message: StepInput, connection: Connection) -> str:
        # Looked at under the lock, whatever was seen before: a second run may have come first.
        if CHARGE in completed_steps(connection, message.job_id):
            return ALREADY_COMPLETED
        now = now_ms()
        self._payments.record(connection, message.job_id, message.amount, now)
        complete_charge(connection, message.job_id, message.amount, now)
        return COMMITTED

    def _record_shipment(self, message: StepInput, connection: Connection, *, ended: bool) -> str:
        done = completed_steps(connection, message.job_id)
        if ended:
            end_job(connection, message.job_id, None)
        if SHIP in done:
            return ALREADY_COMPLETED
        now = now_ms()
        self._shipping.record(connection, message.job_id, now)
        complete_ship(connection, message.job_id, now)
        return COMMITTED


def _refuse(job_id: str, _key: str) -> None:
    raise ApplicationError(f"shipping of {job_id} was told to fail", type="ShippingFailed")


@contextmanager
def _no_such_job() -> Iterator[None]:
    """Trying again would not make one."""
    try:
        yield
    except NotFound as error:
        raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from error

"""One event at one receiver: the attempts of a failing event, and the one attempt taken by hand."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from contracts.errors import NotFound, Refused, TransactionEnded
from contracts.messages import DeliveryInput, DeliveryResult
from contracts.names import receiver_id
from pipeline.failure import RetryPolicy, describe, is_unavailable
from pipeline.hub import Hub
from pipeline.lending import attempt, lent
from pipeline.writer import Writer
from receivers.base import Receiver, RejectEvent
from receivers.registry import require
from store.clock import now_ms
from store.deliveries import (
    DEAD,
    DONE,
    PENDING,
    RETRYING,
    WAIVED,
    Delivery,
    load_delivery,
    mark_done,
    postpone_attempt,
    record_failure,
    waits_behind,
)
from store.dialect import is_infrastructure_error
from store.receivers import get_hold, last_progress, lock_receiver, note_progress, release_receiver

logger = logging.getLogger(__name__)


class DrillFailure(Exception):
    """Asked for by hand (`event deliver --fail`)."""


@dataclass(frozen=True)
class _Attempt:
    """What one transaction came to: the result, or an error with the seconds until the next attempt."""

    result: DeliveryResult
    retry_in: float | None = None
    error: str | None = None
    kind: str = "ReceiverFailed"


class DeliveryActivities:
    """Attempts of single events, outside the batches."""

    def __init__(
        self,
        writer: Writer,
        receivers: Mapping[str, Receiver],
        hub: Hub,
        *,
        retry: RetryPolicy,
        settled: Callable[[str], Awaitable[None]],
    ) -> None:
        """`settled(receiver)` is called when a failing event came to an end, so that others get their turn."""
        self._writer = writer
        self._receivers = receivers
        self._hub = hub
        self._retry = retry
        self._settled = settled

    @activity.defn
    async def attempt_delivery(self, message: DeliveryInput) -> DeliveryResult:
        """The next attempt of a `retrying` delivery; returns once it is settled.

        `deliveries.attempts` decides, not Temporal's counter: a lost answer or a restarted run costs no attempt.
        Raises ApplicationError `ReceiverFailed` with the delay until the next attempt.
        """
        attempt = await self._take(message, self._attempt)
        if attempt.error is not None:
            raise ApplicationError(
                attempt.error,
                type=attempt.kind,
                next_retry_delay=timedelta(seconds=attempt.retry_in or 0),
                category=ApplicationErrorCategory.BENIGN,
            )
        # Word first: a drain that is about to rest sees it, and one that rests already is woken by what follows.
        self._hub.notify([receiver_id(message.receiver)])
        await self._settled(message.receiver)
        return attempt.result

    @activity.defn
    async def deliver_by_hand(self, message: DeliveryInput) -> DeliveryResult:
        """One attempt now; a failure leaves the delivery as it was.

        Raises ApplicationError `ReceiverFailed`, not to be retried, or `Refused` when it is not its turn.
        """
        attempt = await self._take(message, self._by_hand)
        if attempt.error is not None:
            raise ApplicationError(attempt.error, type=attempt.kind, non_retryable=True)
        self._hub.notify([receiver_id(message.receiver)])
        return attempt.result

    async def _take(self, message: DeliveryInput, work: Callable[..., _Attempt]) -> _Attempt:
        """One transaction; if the receiver ends it, another one that records so."""
        try:
            return await self._writer.write(partial(work, message=message, ended=None))
        except TransactionEnded as ended:
            logger.error("%s", ended)
            return await self._writer.write(partial(work, message=message, ended=ended))

    def _require(self, name: str) -> Receiver:
        try:
            return require(name, self._receivers)
        except NotFound as error:
            # Retried: a newer worker may know it.
            raise ApplicationError(str(error), type="UnknownReceiver") from error

    def _attempt(self, connection: Connection, message: DeliveryInput, ended: TransactionEnded | None) -> _Attempt:
        lock_receiver(connection, message.receiver)
        delivery = load_delivery(connection, message.receiver, message.event_id)
        if delivery.status != RETRYING:
            return _Attempt(_result(delivery))  # also where its receiver was ended, and no worker knows it
        receiver = self._require(message.receiver)
        now = now_ms()
        wait = ((delivery.next_attempt_at or 0) - now) / 1000
        if wait > 0:
            last = f"; the last one failed: {delivery.last_error}" if delivery.last_error else ""
            return _Attempt(
                _result(delivery), wait, f"{self._count(delivery.attempts + 1)} is not due yet{last}", "NotDue"
            )
        error = self._try(connection, receiver, delivery, fail=message.fail, ended=ended)
        if error is None:
            return _Attempt(DeliveryResult(DONE, delivery.attempts))
        if is_unavailable(error) and not self._others_succeed(connection, delivery):
            delay = self._retry.delay(delivery.attempts)
            postpone_attempt(
                connection, receiver.name, delivery.event.position, now + int(delay * 1000), describe(error)
            )
            return _Attempt(_result(delivery), delay, describe(error), "ReceiverUnavailable")
        attempts = delivery.attempts + 1
        due = None if isinstance(error, RejectEvent) else self._retry.next_attempt_at(attempts, now)
        record_failure(
            connection,
            receiver.name,
            delivery.event.position,
            attempts=attempts,
            error=describe(error),
            next_attempt_at=due,
            now=now,
        )
        if due is None:
            return _Attempt(DeliveryResult(DEAD, attempts, describe(error)))
        return _Attempt(_result(delivery), (due - now) / 1000, f"{self._count(attempts)} failed: {describe(error)}")

    def _count(self, attempt: int) -> str:
        # The Web UI counts without a bound: it knows Temporal's attempts, not ours.
        return f"attempt {attempt} of {self._retry.attempts}"

    def _others_succeed(self, connection: Connection, delivery: Delivery) -> bool:
        """Whether the receiver took something since this event was tried last: then it is up, and the event bad."""
        if get_hold(connection, delivery.receiver) is not None:
            return False
        tried_at = (delivery.next_attempt_at or 0) - int(self._retry.delay(delivery.attempts) * 1000)
        return last_progress(connection, delivery.receiver) > tried_at

    def _by_hand(self, connection: Connection, message: DeliveryInput, ended: TransactionEnded | None) -> _Attempt:
        lock_receiver(connection, message.receiver)
        delivery = load_delivery(connection, message.receiver, message.event_id)
        result = _result(delivery)
        if delivery.status == DONE:
            return _Attempt(result)
        if delivery.status not in (PENDING, RETRYING):
            state = "waived" if delivery.status == WAIVED else "a dead letter; redrive it first"
            return _Attempt(result, error=f"{message.event_id} is {state}", kind=Refused.__name__)
        receiver = self._require(message.receiver)
        before = waits_behind(connection, receiver.name, delivery.event)
        if before is not None:
            return _Attempt(result, error=f"{message.event_id} waits behind {before}", kind=Refused.__name__)
        error = self._try(connection, receiver, delivery, fail=message.fail, ended=ended)
        if error is not None:
            return _Attempt(result, error=describe(error))
        return _Attempt(DeliveryResult(DONE, delivery.attempts))

    def _try(
        self,
        connection: Connection,
        receiver: Receiver,
        delivery: Delivery,
        *,
        fail: bool,
        ended: TransactionEnded | None,
    ) -> Exception | None:
        """The effect and its `done`, or the error and neither. `ended`: what became of the try before."""
        position = delivery.event.position
        if ended is not None:
            if (ended.receiver, ended.positions) != (receiver.name, [position]):
                raise ended  # a neighbour in the same transaction
            return ended
        try:
            with attempt(connection, receiver.name, [position]):
                if fail:
                    raise DrillFailure(f"{receiver.name} was told to fail")
                with lent(connection):
                    receiver.deliver(connection, delivery.event)
                mark_done(connection, receiver.name, [position])
        except Exception as error:
            if is_infrastructure_error(error):
                raise
            return error
        # It is up, and so known at once; with nothing left to probe it with, it would stay on hold for ever.
        note_progress(connection, receiver.name, now_ms())
        release_receiver(connection, receiver.name)
        return None


def _result(delivery: Delivery) -> DeliveryResult:
    return DeliveryResult(delivery.status, delivery.attempts, delivery.last_error)

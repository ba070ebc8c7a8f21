"""A receiver's drain: its pending events in order, each batch with its effects and `done` in one transaction.

If a batch raises, it is rolled back to a savepoint and taken in pieces, down to the events that fail by themselves;
after a failure the rest of that event's aggregate waits. Errors of our own database end the transaction and are
retried by Temporal; they are nobody's failed attempt. A receiver that is unavailable is put on hold: it is probed with
one event at a time, and nothing is spent.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from contracts.errors import TransactionEnded
from contracts.events import Event
from contracts.names import FAN_OUT_ID, receiver_id
from pipeline.failure import RetryPolicy, describe, is_unavailable
from pipeline.fan_out import relay_rests
from pipeline.lending import attempt, lent
from pipeline.pieces import Pieces
from pipeline.stage import BatchSize
from pipeline.writer import Writer
from receivers.base import Receiver, RejectEvent
from store.batch import EventBatch
from store.clock import now_ms
from store.deliveries import (
    PENDING,
    first_next,
    load_delivery,
    mark_done,
    next_batch,
    next_probe,
    record_failure,
    waits_behind,
)
from store.dialect import is_infrastructure_error
from store.outbox import outbox_at_rest
from store.receivers import Hold, get_hold, hold_receiver, lock_receiver, note_progress, release_receiver
from store.stalls import receiver_backlog

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds that a receiver stays hot for events that are still on their way
_LONGEST_TRANSACTION = 0.010  # seconds, once something failed
_PROGRESS_EVERY_MS = 1000
_MOST_ACCUSED = 2  # a receiver that comes and goes costs no more events an attempt


@dataclass
class _Taking:
    """State of one transaction. `more`: whether it may have left something. `suspect`: an event that met an unavailable
    receiver, until another one tells whether the receiver is down or the event bad; `met`: all that met it so and were
    not told about."""

    deadline: float
    taken: int = 0
    failed: int = 0
    more: bool = True
    closed: set[str] = field(default_factory=set)  # aggregates of which no more is taken
    suspect: tuple[Event, Exception] | None = None
    met: list[Event] = field(default_factory=list)
    down: bool = False
    hold: Hold | None = None


class ReceiverStage:
    """Drains one receiver's pending deliveries."""

    fed_by: str | None = FAN_OUT_ID
    watch: Callable[[], bool] | None = None
    more = False

    def __init__(self, receiver: Receiver, writer: Writer, *, retry: RetryPolicy) -> None:
        self.name = receiver_id(receiver.name)
        self._receiver = receiver
        self._writer = writer
        self._retry = retry
        self._size = BatchSize()
        self._noted_at = 0
        self._probed = 0
        self._changes = writer.changes()
        self._alone_until = 0  # position up to which events are taken one by one; 0: in batches
        self._accused: list[Event] = []  # met the receiver as unavailable when it was put on hold
        self.hold: Hold | None = None
        self.waits: str | None = None

    async def begin(self) -> None:
        """See whether the receiver is on hold."""
        self.hold = await self._writer.read(partial(get_hold, receiver=self._receiver.name))

    async def sees_work(self) -> bool:
        """Whether there is something to take. To take nothing is a write transaction, too: a turn at the lock, for
        which whoever places an order waits."""
        if not self._changes.worth_a_look():
            return False
        waits = await self._writer.read(partial(first_next, receiver=self._receiver.name)) is not None
        if not waits:
            self._changes.found_nothing()
        return waits

    async def step(self) -> int:
        """Take one batch; how many events left `pending`."""
        taking = await self._taken()
        self.hold = taking.hold
        self.more = taking.more
        return taking.taken + taking.failed

    async def _taken(self) -> _Taking:
        """What one transaction came to. Where the receiver ends it, the events of that batch are given to it one by
        one: what it ends for one alone is that event's failure."""
        try:
            return await self._writer.write(self._take)
        except TransactionEnded as ended:
            if ended.receiver != self._receiver.name:
                raise  # a neighbour in the same transaction
            logger.error("%s", ended)
            if len(ended.positions) > 1:
                self._alone_until = ended.positions[-1]
                return await self._taken()
            return await self._writer.write(partial(self._answer_for, ended=ended))

    async def may_rest(self, idle: float) -> bool:
        """Once the relay rests and nothing is on its way here, or has been for so long that it may take longer."""
        if not await relay_rests(self._writer):
            return False
        if idle < _PATIENCE and not await self._writer.read(outbox_at_rest):
            return False
        backlog = await self._writer.read(lambda connection: receiver_backlog(connection, self._receiver.name))
        self.waits = backlog.sentence() if backlog else None
        return backlog is None or not backlog.can_go_on

    def _take(self, connection: Connection) -> _Taking:
        hold = lock_receiver(connection, self._receiver.name)
        started = time.monotonic()
        taking = _Taking(deadline=started + _LONGEST_TRANSACTION)
        most = 1 if hold is not None or self._alone_until else self._size.value
        events = self._next(connection, most, probing=hold is not None)
        if events:
            self._take_events(connection, events, taking)
        taking.more = len(events) == most or taking.taken < len(events)
        if hold is not None and taking.taken:
            self._try_accused(connection, taking)
        self._settle_hold(connection, hold, taking)
        now = now_ms()
        if taking.taken and now - self._noted_at > _PROGRESS_EVERY_MS:
            note_progress(connection, self._receiver.name, now)
            self._noted_at = now
        if taking.taken:
            moved = taking.taken + taking.failed
            self._size.observe(moved, time.monotonic() - started, left=len(events) - moved)
        return taking

    def _next(self, connection: Connection, most: int, *, probing: bool) -> EventBatch:
        if not probing:
            events = next_batch(connection, self._receiver.name, most)
            if not events or events.positions[0] >= self._alone_until:
                self._alone_until = 0
            return events
        # One at a time, and another aggregate each time: behind one bad event the receiver may be well.
        probe = next_probe(connection, self._receiver.name, self._probed)
        self._probed = probe.positions[0] if probe else 0
        return probe

    def _answer_for(self, connection: Connection, ended: TransactionEnded) -> _Taking:
        taking = _Taking(time.monotonic(), hold=lock_receiver(connection, self._receiver.name))
        (event,) = EventBatch(connection, ended.positions[:1])
        if load_delivery(connection, self._receiver.name, event.event_id).status == PENDING:
            self._fail(connection, event, ended, taking)
        return taking

    def _try_accused(self, connection: Connection, taking: _Taking) -> None:
        """The receiver is back: those that met it as down are tried now, right beside one that it took. What it is
        still unavailable for fails by itself; put on hold for it again, the receiver would stand still for ever."""
        accused, self._accused = self._accused, []
        for event in accused:
            delivery = load_delivery(connection, self._receiver.name, event.event_id)
            if delivery.status == PENDING and waits_behind(connection, self._receiver.name, event) is None:
                alone = EventBatch(connection, [event.position])
                self._take_events(connection, alone, taking)
                self._absolve_receiver(connection, taking)

    def _settle_hold(self, connection: Connection, hold: Hold | None, taking: _Taking) -> None:
        """Unavailable and nothing after it went well: the receiver is down. Something went well: it is up."""
        if taking.suspect is not None:
            reason = describe(taking.suspect[1])
            taking.hold = hold_receiver(connection, self._receiver.name, reason, now_ms())
            if hold is None:
                self._accused = []
                self._probed = taking.met[-1].position  # another one first: it may tell at once
            known = {event.position for event in self._accused}
            self._accused += [event for event in taking.met if event.position not in known]
            del self._accused[_MOST_ACCUSED:]
        elif taking.taken or taking.failed:
            if hold is not None:
                release_receiver(connection, self._receiver.name)
        else:
            taking.hold = hold

    def _take_events(self, connection: Connection, events: EventBatch, taking: _Taking) -> None:
        """As many at a time as go well, and alone what fails. Once something failed, until the transaction is old."""
        left = events.without(taking.closed)
        pieces = Pieces(len(left))
        while left and not taking.down and not (taking.failed and time.monotonic() > taking.deadline):
            piece = left[: pieces.size]
            error = self._attempt(connection, piece)
            if error is None:
                pieces.went_well(len(piece))
                taking.taken += len(piece)
                self._absolve_receiver(connection, taking)
                left = left[len(piece) :]
            elif len(piece) > 1:
                pieces.failed(len(piece), piece.stands_at)
            else:
                pieces.failed_alone()
                self._blame(connection, piece[0], error, taking)
                left = left[1:].without(taking.closed)

    def _attempt(self, connection: Connection, events: EventBatch) -> Exception | None:
        """Their effects and their `done`, or the error and neither."""
        try:
            with attempt(connection, self._receiver.name, events.positions):
                with lent(connection):
                    self._receiver.deliver_batch(connection, events)
                mark_done(connection, self._receiver.name, events.positions)
        except Exception as error:
            if is_infrastructure_error(error):
                raise
            return error
        return None

    def _blame(self, connection: Connection, event: Event, error: Exception, taking: _Taking) -> None:
        """It failed alone."""
        if is_unavailable(error):
            self._suspect(event, error, taking)
        else:
            self._absolve_receiver(connection, taking)
            self._fail(connection, event, error, taking)

    def _suspect(self, event: Event, error: Exception, taking: _Taking) -> None:
        taking.closed.add(event.aggregate_id)
        taking.met.append(event)
        if taking.suspect is None:
            taking.suspect = (event, error)
        else:
            taking.down = True  # two in a row: it is the receiver

    def _absolve_receiver(self, connection: Connection, taking: _Taking) -> None:
        """The receiver answered: whoever met it as unavailable just before failed by itself."""
        if taking.suspect is not None:
            event, error = taking.suspect
            taking.suspect = None
            taking.met.clear()
            self._fail(connection, event, error, taking)

    def _fail(self, connection: Connection, event: Event, error: Exception, taking: _Taking) -> None:
        taking.failed += 1
        taking.closed.add(event.aggregate_id)
        now = now_ms()
        record_failure(
            connection,
            self._receiver.name,
            event.position,
            attempts=1,
            error=describe(error),
            next_attempt_at=None if isinstance(error, RejectEvent) else self._retry.next_attempt_at(1, now),
            now=now,
        )

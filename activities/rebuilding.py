"""The phases of a rebuild. Long ones go on in short transactions, say how far they are, and may be repeated from the
start."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from contracts.errors import NotFound, Refused
from contracts.messages import RebuildInput, RebuildReport, RebuildStep, ReconcileReport
from pipeline.writer import Writer
from store.clock import iso, now_ms
from store.rebuild import (
    RECONCILING,
    REPLAYING,
    Rebuild,
    activate,
    begin_rebuild,
    expect_chunk,
    fail_rebuild,
    fix_history,
    forget_expected,
    get_rebuild,
    leftover_expected,
    replay_chunk,
    seal,
    set_phase,
    store_certificate,
    undrained,
)
from store.reconcile import Reconciliation, certificate_text, check_sums, read_range

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two questions whether the outbox is drained
_READ_RANGE = 20_000
_NARROWEST, _WIDEST = 500, 50_000
_TARGET = 0.015  # seconds a write transaction of the replay should take


class _Width:
    """How many rows a write transaction takes, so that it lasts about 15 ms and others get the write lock."""

    def __init__(self) -> None:
        self.value = 2_000

    def observe(self, seconds: float) -> None:
        factor = min(2.0, max(0.5, _TARGET / max(seconds, 0.0005)))
        self.value = int(min(_WIDEST, max(_NARROWEST, self.value * factor)))


class RebuildActivities:
    """The saga's steps over one database."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @activity.defn
    async def begin_rebuild(self, message: RebuildInput) -> RebuildReport:
        """Pause intake and record the rebuild. Raises `Refused` while another one runs."""
        run_id = activity.info().workflow_run_id
        if run_id is None:
            raise ApplicationError("a rebuild is begun by its workflow", type=Refused.__name__, non_retryable=True)
        return await self._write(
            partial(
                begin_rebuild,
                run_id=run_id,
                kind=message.kind,
                target=message.target,
                resume=message.resume,
                now=now_ms(),
            )
        )

    @activity.defn
    async def await_drained(self, message: RebuildStep) -> RebuildReport:
        """Once every `order-placed` event has its deliveries, fix the history and the expected set.

        Until then it raises `NotDrained` with what is left, and Temporal asks again: its clock knows how long that has
        been, whatever became of workers meanwhile. After `bound` seconds that is the end.
        """
        while not await self._transaction(partial(fix_history, rebuild_id=message.rebuild_id, now=now_ms())):
            waiting = await self._writer.read(partial(undrained, limit=20))
            if waiting:  # or the last one has just gone through
                raise _not_drained(waiting, message.bound)
        after: str | None = ""
        width = _Width()
        while after is not None:
            after = await self._chunk(
                width, partial(expect_chunk, rebuild_id=message.rebuild_id, after=after, limit=width.value)
            )
            activity.heartbeat("fixing the expected set")
        return await self._report(message.rebuild_id)

    @activity.defn
    async def replay(self, message: RebuildStep) -> RebuildReport:
        """Apply the whole history to the new generation, which takes what it lacks."""
        await self._transaction(partial(set_phase, rebuild_id=message.rebuild_id, phase=REPLAYING))
        position: int | None = 0
        width = _Width()
        while position is not None:
            position = await self._chunk(
                width, partial(replay_chunk, rebuild_id=message.rebuild_id, after=position, width=width.value)
            )
            activity.heartbeat(f"replayed to position {position}")
        await self._transaction(partial(set_phase, rebuild_id=message.rebuild_id, phase=RECONCILING))
        return await self._report(message.rebuild_id)

    @activity.defn
    async def reconcile(self, message: RebuildStep) -> ReconcileReport:
        """Compare the generation with the expected set, id by id and amount by amount."""
        found, _ = await self._reconcile(message.rebuild_id)
        return ReconcileReport(found.count, found.digest, found.problems())

    @activity.defn
    async def seal(self, message: RebuildStep) -> RebuildReport:
        """Close the generation to writes."""
        await self._transaction(partial(seal, rebuild_id=message.rebuild_id))
        return await self._report(message.rebuild_id)

    @activity.defn
    async def certify(self, message: RebuildStep) -> ReconcileReport:
        """Compare the sealed generation once more, from the database, and store the certificate if it is equal."""
        found, sums = await self._reconcile(message.rebuild_id)
        if not found.problems():
            rebuild = await self._writer.read(partial(get_rebuild, rebuild_id=message.rebuild_id))
            text = certificate_text(
                rebuild_id=rebuild.rebuild_id,
                generation=rebuild.generation,
                found=found,
                sums=sums,
                now_iso=iso(now_ms()) or "",
            )
            await self._transaction(partial(store_certificate, rebuild_id=message.rebuild_id, certificate=text))
        return ReconcileReport(found.count, found.digest, found.problems())

    @activity.defn
    async def activate(self, message: RebuildStep) -> RebuildReport:
        """Swap the generations in one transaction. Raises `Refused` naming the condition that does not hold."""
        return await self._write(partial(activate, rebuild_id=message.rebuild_id, now=now_ms()))

    @activity.defn
    async def fail_rebuild(self, message: RebuildStep) -> RebuildReport:
        """End it without a switch, and report what the database says: COMPLETED if the switch was made before."""
        return await self._write(
            partial(fail_rebuild, rebuild_id=message.rebuild_id, error=message.error, now=now_ms())
        )

    @activity.defn
    async def forget_expected(self, message: RebuildStep) -> None:
        """Remove the expected set of a rebuild that is over, and of earlier ones whose run could not do so."""
        rebuild_id: str | None = message.rebuild_id
        width = _Width()
        while rebuild_id is not None:
            if await self._chunk(width, partial(forget_expected, rebuild_id=rebuild_id, limit=width.value)):
                activity.heartbeat("removing the expected set")
            else:
                rebuild_id = await self._writer.read(leftover_expected)

    async def _reconcile(self, rebuild_id: str) -> tuple[Reconciliation, dict[str, list[int]]]:
        rebuild = await self._writer.read(partial(get_rebuild, rebuild_id=rebuild_id))
        found = Reconciliation()
        after = ""
        while True:
            part = await self._writer.read(
                partial(
                    read_range,
                    rebuild_id=rebuild_id,
                    generation=rebuild.generation,
                    after=after,
                    limit=_READ_RANGE,
                )
            )
            await self._writer.call(partial(found.add, part))
            activity.heartbeat(f"compared {found.count:,} of {rebuild.expected:,}")
            if part.last is None:
                break
            after = part.last
        sums = await self._writer.read(
            partial(check_sums, rebuild_id=rebuild_id, generation=rebuild.generation, found=found)
        )
        return found, sums

    async def _transaction(self, work: Callable[[Connection], T]) -> T:
        return (await self._timed_transaction(work))[0]

    async def _chunk(self, width: _Width, work: Callable[[Connection], T]) -> T:
        """One of many transactions; `width` learns from it. Not from its wait for the lock: beside a busy pipeline it
        would do ever less each time that it is its turn."""
        result, seconds = await self._timed_transaction(work)
        width.observe(seconds)
        return result

    async def _timed_transaction(self, work: Callable[[Connection], T]) -> tuple[T, float]:
        try:
            return await self._writer.timed_write(work)
        except (Refused, NotFound) as error:
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from error

    async def _write(self, work: Callable[[Connection], Rebuild]) -> RebuildReport:
        return _as_report(await self._transaction(work))

    async def _report(self, rebuild_id: str) -> RebuildReport:
        return _as_report(await self._writer.read(partial(get_rebuild, rebuild_id=rebuild_id)))


def _as_report(rebuild: Rebuild) -> RebuildReport:
    return RebuildReport(
        rebuild.rebuild_id,
        rebuild.kind,
        rebuild.state,
        rebuild.generation,
        rebuild.base_generation,
        rebuild.expected,
        rebuild.replayed,
        rebuild.error,
    )


def _not_drained(waiting: list[str], bound: float) -> ApplicationError:
    """Asked again soon: seldom enough while it takes long, and for the last time when the bound runs out."""
    info = activity.info()
    waited = (info.current_attempt_scheduled_time - info.scheduled_time).total_seconds()
    left = bound - waited
    if left <= 0:
        return ApplicationError(
            f"the outbox was not drained within {bound:g} s; waiting: {', '.join(waiting)}",
            type="NotDrained",
            non_retryable=True,
        )
    pause = min(max(_SHORTEST_PAUSE, waited / 10), _LONGEST_PAUSE, left)
    return ApplicationError(
        f"the outbox is not drained; waiting: {', '.join(waiting)}",
        type="NotDrained",
        next_retry_delay=timedelta(seconds=pause),
        category=ApplicationErrorCategory.BENIGN,
    )

"""The look: about once a second, indexed reads that find work whose wake, run or message was lost, and put it right.

What it never does is act on age alone: a slow queue is not a lost one, and a drain that works needs no wake.

The database is read once a look, and not at all where nobody has committed since the last one: what is unfinished is as
it was then, and what of it is due by now the clock tells.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TypeVar

import redis
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from temporalio.client import WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from contracts.counts import counted
from contracts.errors import SaiseiError
from contracts.messages import FulfilmentInput
from contracts.names import FAN_OUT_ID, REBUILD_ID, RELAY_ID, job_workflow_id, receiver_id, redrive_id
from pipeline.event_list import EventList
from pipeline.hub import Hub
from pipeline.recovery import recover_outbox
from pipeline.retries import Retries
from pipeline.writer import Writer
from runs.presence import first_runs
from runs.search_attributes import register_search_attributes
from runs.starts import Runs
from store.clock import now_ms
from store.deliveries import forget_runs
from store.engine import Changes
from store.jobs import (
    JOB_LOOK_MS,
    asked_for_at,
    due_for_look,
    hasten_looks,
    postpone_look,
    settle_lost_job,
)
from store.rebuild import fail_rebuild
from store.redrives import cancel_redrive, postpone_redrive_look, redrives_due
from store.unfinished import Unfinished, unfinished

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOBS_AT_ONCE = 20
_LOST_AT_ONCE = 1000  # the rest at the next look: others wait for this one
_REDRIVES_AT_ONCE = 20
_REDRIVE_EVERY_MS = 10_000
_REBUILD_GRACE_MS = 2_000
_PRESENCE_EVERY = 5.0  # seconds between two questions whether the long-lived runs are there
_LONGEST_SILENCE = 60.0
_PATIENCE = 15.0  # seconds for each part of a look


@dataclass
class _Seen:
    """The oldest work of a stage when it was last looked at, and when to wake the stage for it again."""

    item: bytes | int
    wake_at: float
    pause: float = 1.0


@dataclass
class Look:
    """Reads the database and Redis once, and starts or wakes what is missing. One a worker; twins are harmless."""

    writer: Writer
    events: EventList
    hub: Hub
    runs: Runs
    receivers: Sequence[str]
    lost_after: float  # seconds
    run_grace: InitVar[float]  # seconds
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _presence_at: float = 0.0
    _firsts: list[str | None] | None = None  # the first run of each long-lived one, as Temporal named them last
    _said: str | None = None
    _trouble: str | None = None
    _changes: Changes = field(init=False)
    _retries: Retries = field(init=False)
    _found: Unfinished | None = None

    def __post_init__(self, run_grace: float) -> None:
        self._changes = self.writer.changes()
        self._retries = Retries(self.writer, self.runs.start_delivery, run_grace)

    async def once(self) -> None:
        """One look. What does not answer just now is left for the next one; its absence is logged once."""
        self._trouble = None
        found = await self._try(self._database)
        if found is not None:
            for part in (
                self._lost_messages,
                self._stalled_stages,
                self._failing_events,
                self._jobs,
                self._redrives,
                self._rebuild,
            ):
                await self._try(part, found)
        await self._try(self._stalled_fan_out)
        await self._try(self._presence)
        if self._trouble != self._said:
            if self._trouble:
                logger.warning("the look could not see everything (%s)", self._trouble)
            else:
                logger.info("the look sees everything again")
            self._said = self._trouble

    async def rest(self, seconds: float) -> None:
        """Until the next look. Failing events that fall due meanwhile get their runs when they do."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            due_in = self._retries.seconds()
            await asyncio.sleep(left if due_in is None else min(left, due_in))
            for receiver in self._retries.due():
                await self.start_due(receiver)

    async def start_due(self, receiver: str) -> None:
        """Start the runs of the receiver's failing events that are due and have none. What does not answer just now
        is left for the next look."""
        await self._try(self._retries.start_due, receiver)

    async def _try(self, part: Callable[..., Awaitable[T]], *found: object) -> T | None:
        try:
            async with asyncio.timeout(_PATIENCE):  # a server that hangs must not hide what the others know
                return await part(*found)
        except (redis.RedisError, RPCError, RuntimeError, OSError, DBAPIError, SaiseiError, TimeoutError) as error:
            self._trouble = self._trouble or f"{part.__name__.strip('_')}: {type(error).__name__}: {error}"
            if isinstance(error, RPCError | RuntimeError):
                self._presence_at = 0.0  # Temporal may come back empty: ask as soon as it answers
            return None

    async def _database(self) -> Unfinished:
        """What is unfinished, as it was read last if nobody has committed since."""
        if self._changes.any():
            self._found = None  # also if the read fails
        if self._found is None:
            self._found = await self.writer.read(lambda connection: unfinished(connection, self.receivers))
        return self._found

    async def recover_outbox(self, *, before: int) -> int:
        """Events published before `before` (UTC ms) that Redis lost go through the relay again; how many."""
        return await recover_outbox(self.writer, self.events, before=before, most=_LOST_AT_ONCE)

    async def _lost_messages(self, found: Unfinished) -> None:
        before = now_ms() - int(self.lost_after * 1000)
        if found.published_at is None or found.published_at >= before:
            return
        count = await self.recover_outbox(before=before)
        if count:
            logger.warning("sent again, since Redis lost it: %s", counted(count, "event"))
            await self.runs.wake()

    async def _stalled_stages(self, found: Unfinished) -> None:
        await self._consider(RELAY_ID, found.pending)
        for name in self.receivers:
            await self._consider(receiver_id(name), found.next[name])

    async def _stalled_fan_out(self) -> None:
        drained = self.hub.is_draining(FAN_OUT_ID)
        await self._consider(FAN_OUT_ID, None if drained else await self.writer.call(self.events.first))

    async def _consider(self, stage: str, item: bytes | int | None) -> None:
        """Wake a stage whose oldest work, `item`, is the same as at the last look. A drain elsewhere would have taken
        it; a stage that cannot work (Redis is down) is woken less and less often."""
        if item is None or self.hub.is_draining(stage):
            self._seen.pop(stage, None)
            return
        now = time.monotonic()
        seen = self._seen.get(stage)
        if seen is None or seen.item != item:
            self._seen[stage] = _Seen(item, now)
            return
        if now >= seen.wake_at:
            # What comes after the fan-out, too: at rest it would be found by two looks more, each of them.
            stages = self.runs.stages
            await self.runs.wake(stages[stages.index(stage) :] if stage == FAN_OUT_ID else [stage])
            seen.wake_at = now + seen.pause
            seen.pause = min(seen.pause * 2, _LONGEST_SILENCE)

    async def _failing_events(self, found: Unfinished) -> None:
        await self._retries.see(found.retrying)

    async def _jobs(self, found: Unfinished) -> None:
        now = now_ms()
        if found.jobs_look_at is None or found.jobs_look_at > now:
            return
        for job_id, amount in await self.writer.read(lambda connection: due_for_look(connection, now, _JOBS_AT_ONCE)):
            run = await self._run(job_workflow_id(job_id))
            if run is None or await self._is_older(run, job_id):
                await self.runs.start_job(FulfilmentInput(job_id, amount))
            elif run.status is not WorkflowExecutionStatus.RUNNING:
                # Its outcome is not in the row: it was asked for once more while this run was at its end, or somebody
                # terminated or cancelled it, which is not ours to undo.
                completed = run.status is WorkflowExecutionStatus.COMPLETED
                what = run.status.name.lower() if run.status else "lost"
                sentence = None if completed else f"its run was {what}; `job run {job_id}` resumes it"
                await self.writer.write(partial(settle_lost_job, job_id=job_id, error=sentence, now=now))
                continue
            await self.writer.write(partial(postpone_look, job_id=job_id, look_at=now + JOB_LOOK_MS))

    async def _is_older(self, run: WorkflowExecutionDescription, job_id: str) -> bool:
        """Whether the run had ended before the job was asked for (again): Temporal was away, and it has no run yet."""
        return _ended_before(run, await self.writer.read(partial(asked_for_at, job_id=job_id)))

    async def _redrives(self, found: Unfinished) -> None:
        now = now_ms()
        if found.redrives_look_at is None or found.redrives_look_at > now:
            return
        for redrive in await self.writer.read(lambda connection: redrives_due(connection, now, _REDRIVES_AT_ONCE)):
            run = await self._run(redrive_id(redrive.request_id))
            if run is None or _ended_before(run, redrive.created_at):
                await self.runs.start_redrive(redrive.request_id, redrive.filters.get("receiver"))
            elif run.status is not WorkflowExecutionStatus.RUNNING:
                # Ended from outside before it could say so. Not ours to restart: somebody wanted it to stop.
                what = run.status.name.lower() if run.status else "lost"
                note = f"its run was {what}; a redrive with another request id takes the rest"
                await self.writer.write(partial(cancel_redrive, request_id=redrive.request_id, note=note, now=now_ms()))
                continue
            look_at = now + _REDRIVE_EVERY_MS
            await self.writer.write(partial(postpone_redrive_look, request_id=redrive.request_id, look_at=look_at))

    async def _rebuild(self, found: Unfinished) -> None:
        """A rebuild whose run is gone (terminated, or Temporal lost its data) is marked as failed."""
        rebuild = found.rebuild
        if rebuild is None or now_ms() - rebuild.started_at < _REBUILD_GRACE_MS:
            return
        status = await self._run_status(REBUILD_ID)
        if status is not WorkflowExecutionStatus.RUNNING:
            await self.writer.write(
                partial(fail_rebuild, rebuild_id=rebuild.rebuild_id, error="its run is gone", now=now_ms())
            )

    async def _presence(self) -> None:
        now = time.monotonic()
        if now < self._presence_at:
            return
        firsts, running = await first_runs(self.runs.client, self.runs.stages)
        # Somebody's wake may have started the long-lived runs again before we asked, so that none is missing: another
        # first run in the place of one that we knew tells as much.
        strangers = firsts != self._firsts
        if strangers or not running:
            await register_search_attributes(self.runs.client)
        if strangers:
            # Temporal came back without its data (or we have just started, and it may have): jobs and failing events
            # have lost their runs too. Found now, not each when it is next due. Where a run is there after all,
            # starting it again changes nothing.
            await self.writer.write(self._forget_runs)
        if not running:
            logger.info("long-lived runs are missing and are started")
            await self.runs.ensure()
        self._firsts = firsts
        self._presence_at = now + _PRESENCE_EVERY

    @staticmethod
    def _forget_runs(connection: Connection) -> None:
        forget_runs(connection)
        hasten_looks(connection, now_ms())

    async def _run_status(self, workflow_id: str) -> WorkflowExecutionStatus | None:
        run = await self._run(workflow_id)
        return run.status if run is not None else None

    async def _run(self, workflow_id: str) -> WorkflowExecutionDescription | None:
        try:
            return await self.runs.client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise


def _ended_before(run: WorkflowExecutionDescription, moment: int) -> bool:
    """Whether it ended before `moment` (UTC ms): then it is about something else."""
    return run.close_time is not None and run.close_time.timestamp() * 1000 < moment

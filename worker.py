"""The worker's composition root: settings -> database, Redis, Temporal -> stages -> activities -> workers, the look.

Run it with `python worker.py`; it ends on SIGTERM or Ctrl-C, after the batch at hand.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection
from temporalio.client import Client
from temporalio.worker import Interceptor, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

import embedded
from activities.beating import EVERY, Beating
from activities.delivering import DeliveryActivities
from activities.draining import DrainActivities
from activities.fulfilment import FulfilmentActivities, OwnPayments, OwnShipping, PaymentSide, ShippingSide
from activities.rebuilding import RebuildActivities
from activities.redriving import RedriveActivities
from config import Settings, end, no_arguments, unknown_settings
from contracts.errors import Unreachable, WrongSettings
from contracts.names import DRAIN_TASK_QUEUE, TASK_QUEUE, receiver_id, receiver_of
from failures import FAILURES, sentence
from pipeline import event_list
from pipeline.ahead import Ahead
from pipeline.event_list import EventList
from pipeline.failure import RetryPolicy
from pipeline.fan_out import FanOutStage
from pipeline.hub import Hub
from pipeline.look import Look
from pipeline.receiving import ReceiverStage
from pipeline.relay import RelayStage
from pipeline.stage import Limits, Stage
from pipeline.writer import Writer
from receivers.base import Receiver
from receivers.drill import Drillable
from receivers.registry import RECEIVERS, by_name
from runs.connect import connect
from runs.profile import configured_address
from runs.search_attributes import register_search_attributes
from runs.starts import Runs
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from store.receiver_ends import read_end
from store.receivers import current_receivers, register_receiver
from workflows.delivery import DeliveryWorkflow
from workflows.fan_out import FanOutWorkflow
from workflows.fulfilment import FulfilmentWorkflow
from workflows.rebuild import RebuildWorkflow
from workflows.receiver import ReceiverWorkflow
from workflows.redrive import RedriveWorkflow
from workflows.relay import RelayWorkflow

logger = logging.getLogger("saisei.worker")

PIPELINE_WORKFLOWS = (RelayWorkflow, FanOutWorkflow, ReceiverWorkflow)
WORKFLOWS = (*PIPELINE_WORKFLOWS, DeliveryWorkflow, FulfilmentWorkflow, RebuildWorkflow, RedriveWorkflow)

# Our own modules hold no state that a workflow could share, and importing them afresh for each run cost 0.1 s.
_OURS = ("activities", "contracts", "pipeline", "receivers", "runs", "store", "workflows", "sqlalchemy", "redis")
_GRACE = timedelta(seconds=5)
# A worker ends within this many seconds also when Temporal does not answer: service managers kill after 10.
_LONGEST_END = 8.0
# How long a run waits for the worker that holds it in memory before any other may take it: after a kill -9 the first
# wake waited out the default of 10 s.
_STICKY = timedelta(seconds=1)


def sandbox(*shared: str) -> SandboxedWorkflowRunner:
    """Where workflow code runs: what is not deterministic is out of its reach. `shared`: modules beside our own that
    each run takes as they are."""
    return SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*_OURS, *shared))


def steps_worker(
    client: Client,
    activities: Sequence[Callable[..., Any]],
    *,
    interceptors: Sequence[Interceptor] = (),
    **options: Any,
) -> Worker:
    """The worker of the common queue: all workflows, and activities that beat as long as it lives. `options`: more of
    Worker's own."""
    return Worker(
        client,
        task_queue=TASK_QUEUE,
        workflows=WORKFLOWS,
        activities=activities,
        workflow_runner=sandbox(),
        interceptors=[Beating(), *interceptors],
        # Left to itself the SDK holds beats back for four fifths of their time-out, and a slow moment would be taken
        # for a death.
        max_heartbeat_throttle_interval=timedelta(seconds=EVERY),
        sticky_queue_schedule_to_start_timeout=_STICKY,
        **options,
    )


async def end_workers(
    workers: Sequence[Worker], longest: float = _LONGEST_END, *, beside: Sequence["asyncio.Task[None]"] = ()
) -> bool:
    """Shut these down, and wait `longest` seconds at most for them and for what ends `beside` them; whether all ended.

    Temporal's core waits for ever when an activity whose run is over answers at that very moment (sdk-rust 1537), and
    as long as a server does not answer. What an activity did is in the database by then, and a process that does not
    end would be killed all the same.
    """
    shutdowns = {asyncio.create_task(worker.shutdown()) for worker in workers}
    if not shutdowns and not beside:
        return True
    _, late = await asyncio.wait([*shutdowns, *beside], timeout=longest)
    if late:
        logger.warning("Temporal or a receiver does not answer; leaving without its word")
        _leave_behind(late & shutdowns)
    return not late


def _leave_behind(late: set["asyncio.Task[None]"]) -> None:
    """Take the tasks of workers that do not end out of the event loop's list.

    `asyncio.run` cancels what is in it and waits for that; these do not heed a cancellation, and it would never return.
    https://docs.python.org/3/library/asyncio-extending.html#task-lifetime-support
    """
    for task in asyncio.all_tasks():
        frame = getattr(task.get_coro(), "cr_frame", None)
        if task in late or (frame is not None and "/temporalio/worker/" in frame.f_code.co_filename):
            asyncio._unregister_task(task)


class SaiseiWorker:
    """Everything that one worker process runs, as an asynchronous context manager."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        database: Database,
        redis_url: str,
        *,
        receivers: Sequence[Receiver] = RECEIVERS,
        draining: Sequence[str] | None = None,
        payments: PaymentSide | None = None,
        shipping: ShippingSide | None = None,
    ) -> None:
        """`draining`: the receivers whose ReceiverWorkflow runs here; all of `receivers` if not said."""
        self.settings = settings
        self.database = database
        self.receivers = by_name([Drillable(receiver) for receiver in receivers])
        drained = tuple(self.receivers) if draining is None else tuple(draining)
        self.events = EventList(event_list.connect(redis_url))
        self.writer = Writer(database)
        self.hub = Hub()
        self.runs = Runs(client, drained, settings.timings)
        retry = RetryPolicy(settings.attempts, settings.backoff)
        self.look = Look(
            self.writer, self.events, self.hub, self.runs, drained, settings.lost_after, run_grace=settings.heartbeat
        )
        stages: tuple[Stage, ...] = (
            RelayStage(
                self.writer, self.events, self.hub, lease=settings.lease, after_rest=lambda: self._ahead.after_rest()
            ),
            FanOutStage(self.writer, self.events, self.hub, [receiver_id(name) for name in drained]),
            *(ReceiverStage(self.receivers[name], self.writer, retry=retry) for name in drained),
        )

        async def settled(receiver: str) -> None:
            if receiver in drained:
                await self.look.start_due(receiver)
            if self.hub.is_draining(receiver_id(receiver)):
                return
            # What waited behind it may go on; a receiver that was ended meanwhile would be started again.
            if await self.writer.read(partial(read_end, receiver=receiver)) is None:
                await self.runs.wake([receiver_id(receiver)])

        async def wake_receivers(names: Sequence[str]) -> None:
            # Signalled also while it drains: a drain that is about to rest may have looked already.
            awake = [receiver_id(name) for name in names if name in drained]
            self.hub.notify(awake)
            if awake:
                await self.runs.wake(awake)

        deliveries = DeliveryActivities(self.writer, self.receivers, self.hub, retry=retry, settled=settled)
        fulfilment = FulfilmentActivities(self.writer, payments or OwnPayments(), shipping or OwnShipping())
        redrives = RedriveActivities(self.writer, wake_receivers)
        rebuilds = RebuildActivities(self.writer)
        self._ahead = Ahead(stages, self.hub, settings.idle, self.runs.wake)
        self.hub.absent = self._ahead.begin
        drains = DrainActivities(stages, self.hub, Limits(settings.idle, settings.drain), self._why_ended, self._ahead)
        self._workers = (
            steps_worker(
                client,
                [
                    deliveries.attempt_delivery,
                    deliveries.deliver_by_hand,
                    fulfilment.fulfil,
                    fulfilment.charge,
                    fulfilment.ship,
                    fulfilment.end_job,
                    redrives.redrive_chunk,
                    redrives.cancel_redrive,
                    rebuilds.begin_rebuild,
                    rebuilds.await_drained,
                    rebuilds.replay,
                    rebuilds.reconcile,
                    rebuilds.seal,
                    rebuilds.certify,
                    rebuilds.activate,
                    rebuilds.fail_rebuild,
                    rebuilds.forget_expected,
                ],
                max_concurrent_activities=64,
                graceful_shutdown_timeout=_GRACE,
            ),
            Worker(
                client,
                task_queue=DRAIN_TASK_QUEUE,
                activities=[drains.drain],
                max_concurrent_activities=2 * len(stages) + 2,
                graceful_shutdown_timeout=_GRACE,
            ),
        )
        self._looking: asyncio.Task[None] | None = None
        self._started: list[Worker] = []
        self.stuck = False

    async def _why_ended(self, stage: str) -> str | None:
        receiver = receiver_of(stage)
        if receiver is None:
            return None
        end = await self.writer.read(partial(read_end, receiver=receiver))
        return None if end is None or end.ended_at is None else end.sentence()

    async def __aenter__(self) -> "SaiseiWorker":
        try:
            for receiver in await self.writer.write(self._prepare):
                logger.warning(
                    "receiver %s is not in receivers/registry.py and its events wait; `receivers end` ends it", receiver
                )
            await register_search_attributes(self.runs.client)
            for worker in self._workers:
                await worker.__aenter__()
                self._started.append(worker)
            await self.runs.ensure()
        except BaseException:
            await self.__aexit__()
            raise
        self._looking = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End within `_LONGEST_END` seconds. If Temporal or a receiver does not answer by then, `stuck` is set: what
        Temporal was not told it finds out by time-outs, and nothing is lost."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        until = time.monotonic() + _LONGEST_END
        self.stuck = not await end_workers(self._started, beside=[asyncio.create_task(self._ahead.close())])
        if self.stuck:
            return
        # A receiver that hangs keeps its thread, also when the activity that waited for it was given up.
        closing = asyncio.create_task(asyncio.to_thread(self.writer.close))
        _, late = await asyncio.wait([closing], timeout=max(0.0, until - time.monotonic()))
        self.stuck = bool(late)
        if self.stuck:
            logger.warning("what was begun does not end; leaving without it")
            return
        self.events.close()

    def _prepare(self, connection: Connection) -> list[str]:
        """Make what is missing in the database; the receivers of the database that this worker does not know."""
        initialize(connection, now_ms())
        for receiver in self.receivers.values():
            register_receiver(connection, receiver.name, receiver.event_types)
        return [name for name in current_receivers(connection) if name not in self.receivers]

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self.look.rest(self.settings.look)
                await self.look.once()
            except Exception:
                # A bug in the look must not end it: it is the net under everything else.
                logger.exception("the look failed")


def addresses(settings: Settings) -> tuple[str | None, str]:
    """(Temporal's address, Redis URL): as configured, else of the embedded stack of this home.

    Raises Unreachable when neither names a Redis.
    """
    stack = embedded.find(settings.home)
    temporal = configured_address() or (stack.temporal_address if stack else None)
    redis_url = settings.redis_url or (stack.redis_url if stack else None)
    if redis_url is None:
        raise Unreachable("no Redis server is running here; start one with `make up`, or set REDIS_URL")
    return temporal, redis_url


async def serve(settings: Settings, receivers: Sequence[Receiver] = RECEIVERS) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises Unreachable when a server does not answer at the start."""
    by_name(receivers)  # before anything is opened: a registry that is wrong is told at once
    temporal, redis_url = addresses(settings)
    database = Database(settings.database_url, busy_timeout=settings.busy)
    database.ping()
    client = await connect(temporal, "worker")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = SaiseiWorker(settings, client, database, redis_url, receivers=receivers)
    await worker.writer.call(worker.events.ping)
    async with worker:
        # What is loaded by now stays. Each full collection walked through it and held all orders up for 60 ms.
        gc.collect()
        gc.freeze()
        logger.info("worker ready: Temporal %s, Redis %s, %s", temporal, redis_url, database.url)
        await stop.wait()
        logger.info("worker stopping")
    if worker.stuck:
        end(0)  # leaving the event loop would wait for Temporal
    database.close()


def main(receivers: Sequence[Receiver] = RECEIVERS) -> int:
    """The process: logs to stderr, one sentence when it cannot start, and exit code 2 for unusable settings, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if ignored := unknown_settings():
        logger.warning(ignored)
    try:
        asyncio.run(serve(Settings.from_env(), receivers))
    except FAILURES as error:
        print(f"worker: {sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, WrongSettings) else 1
    return 0


if __name__ == "__main__":
    no_arguments("worker.py", "Run one worker, until SIGTERM or Ctrl-C.")
    end(main())

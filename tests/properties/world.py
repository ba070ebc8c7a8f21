"""A worker's real parts over one database and one list, stepped by hand, with a clock of their own.

No Temporal: the runs that it would hold are in `open_runs`, and each of its activities is called as a run calls it,
once more after a death. What decides when an activity runs is the test.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection
from temporalio.testing import ActivityEnvironment

import activities.rebuilding
import pipeline.receiving
import store.clock
from activities.delivering import DeliveryActivities
from activities.rebuilding import RebuildActivities
from activities.redriving import RedriveActivities
from contracts.messages import DeliveryInput, DeliveryResult, RebuildInput, RebuildReport, RebuildStep, RedriveInput
from contracts.names import OUTBOX_LIST
from pipeline import event_list
from pipeline.failure import RetryPolicy
from pipeline.fan_out import FanOutStage
from pipeline.hub import Hub
from pipeline.receiving import ReceiverStage
from pipeline.recovery import recover_outbox
from pipeline.relay import RelayStage
from pipeline.retries import Retries
from receivers.base import Receiver
from receivers.builtin import Billing, Mail, Sales
from receivers.drill import Drillable
from store.control import initialize
from store.deliveries import forget_runs
from store.engine import Database
from store.outbox import outbox_at_rest
from store.receivers import register_receiver
from store.schema import metadata
from tests.properties.dying import Died, DyingList, DyingWriter, Log, Witness, journal
from tests.properties.strategies import Death

T = TypeVar("T")

_RESTART = "ALTER SEQUENCE outbox_position_seq RESTART"
ATTEMPTS = 2  # few, so that many an event dies
LATE = "late"  # a receiver that is added to a running shop


class Clock:
    """In the place of the module `time` in the store's clock: it stands still until it is moved on."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def time_ns(self) -> int:
        return self.ms * 1_000_000

    def advance(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)


class World:
    """Everything of one worker. `begin` empties it for the next example."""

    def __init__(self, database: Database, redis_url: str) -> None:
        self.database = database
        self.clock = Clock()
        self.writer = DyingWriter(database)
        self.client = event_list.connect(redis_url)
        self.list = DyingList(self.client)
        self._runner = asyncio.Runner()
        self._activity = ActivityEnvironment()
        self.hub = Hub()
        self.saga = RebuildActivities(self.writer)
        self.met: Counter[str] = Counter()
        with database.write() as connection:
            journal.metadata.create_all(connection)

    def close(self) -> None:
        with self.database.write() as connection:
            journal.metadata.drop_all(connection)
        self._runner.close()
        self.writer.close()
        self.client.close()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """What would differ from run to run does not, for the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.clock, "time", self.clock)
            # A batch in which events fail ends after so long: on a busy machine now after this event, now after that.
            patch.setattr(pipeline.receiving, "_LONGEST_TRANSACTION", 60.0)
            yield

    def begin(self) -> None:
        """An empty shop, with the built-in receivers and one more."""
        self.client.delete(*(self.client.keys("*") or ["none"]))
        with self.database.write() as connection:
            for table in (*metadata.sorted_tables, journal):
                connection.execute(sa.delete(table))
            # Positions from 1 again: a replay in steps of one would go through those of all examples before.
            again = "DELETE FROM sqlite_sequence" if self.database.is_sqlite else _RESTART
            connection.execute(sa.text(again))
            initialize(connection, 1)
        self.open_runs: list[DeliveryInput] = []
        self.witnesses = {each.name: Witness(each) for each in (Billing(), Mail(), Sales(), Log("log"), Log(LATE))}
        self.here: list[str] = []
        for name in ("billing", "mail", "sales", "log"):
            self.subscribe(name, "order-placed")

    def subscribe(self, receiver: str, *event_types: str) -> None:
        """The receiver takes these from here on."""
        with self.database.write() as connection:
            register_receiver(connection, receiver, event_types)
        if receiver not in self.here:
            self.here.append(receiver)
        self.restart()

    def restart(self) -> None:
        """A new worker: what the old one kept in its memory is gone."""
        self.writer.arm(None)
        self.list.arm(None)
        self.relay = RelayStage(self.writer, self.list, self.hub, lease=15)
        self.fan_out = FanOutStage(self.writer, self.list, self.hub, [])
        retry = RetryPolicy(ATTEMPTS, 1.0)
        receivers: dict[str, Receiver] = {name: Drillable(self.witnesses[name]) for name in self.here}
        self.stages = {name: ReceiverStage(receiver, self.writer, retry=retry) for name, receiver in receivers.items()}
        self.retries = Retries(self.writer, self._start_run, run_grace=12)
        self.delivering = DeliveryActivities(self.writer, receivers, self.hub, retry=retry, settled=self._settled)

    async def _start_run(self, run: DeliveryInput) -> None:
        if run not in self.open_runs:  # a run that exists is not started again
            self.open_runs.append(run)

    async def _settled(self, receiver: str) -> None:
        await self.retries.start_due(receiver)

    def do(self, work: Callable[[], Coroutine[Any, Any, T]], death: Death | None = None) -> T | None:
        """The result, or None when the worker died; then there is a new one."""
        self.clock.advance(1)
        self.writer.arm(death)
        self.list.arm(death)
        try:
            return self._runner.run(work())
        except Died:
            self.met["died"] += 1
            self.restart()
            return None
        finally:
            self.writer.arm(None)
            self.list.arm(None)

    def act(
        self, activity: Callable[..., Coroutine[Any, Any, T]], message: Any, death: Death | None = None
    ) -> T | None:
        """The activity within a context of its own; as `do`."""
        return self.do(lambda: self._activity.run(activity, message), death)

    def transaction(self, work: Callable[[Connection], T]) -> T:
        """What `work` comes to, committed."""
        self.clock.advance(1)
        with self.database.write() as connection:
            return work(connection)

    # --- the flow

    def push(self, size: int, death: Death | None = None) -> int | None:
        """One batch through the relay."""
        self.relay._size.value = size
        return self.do(self.relay.step, death)

    def spread(self, size: int, death: Death | None = None) -> int | None:
        """One batch through the fan-out."""
        self.fan_out._size.value = size
        return self.do(self.fan_out.step, death)

    def take(self, receiver: str, size: int, death: Death | None = None) -> int | None:
        """One batch at the receiver, or one probe while it is on hold; and a second later the runs of what failed."""
        stage = self.stages[receiver]
        stage._size.value = size

        async def take() -> int:
            moved = await stage.step()
            self.clock.advance(1)
            await self.retries.start_due(receiver)
            return moved

        return self.do(take, death)

    def flow(self) -> None:
        """All that waits goes into the list and out of it; what a dead worker left there too."""
        while self.push(1000) or self.spread(1000):
            pass

    def recover(self) -> int:
        """What the list has lost is `PENDING` again."""
        self.clock.advance(60)
        return self.do(lambda: recover_outbox(self.writer, self.list, before=self.clock.ms)) or 0

    def put(self, *entries: bytes) -> None:
        """Into the list, past the relay."""
        self.client.rpush(OUTBOX_LIST, *entries)

    def lose(self, entries: int) -> None:
        """The list loses its first so many entries."""
        self.client.ltrim(OUTBOX_LIST, entries, -1)

    def attempt(self, run: DeliveryInput, death: Death | None = None) -> DeliveryResult | None:
        """The next attempt of a failing event, when it is due. Raises ApplicationError while it is not settled."""
        self.clock.advance(3600)
        result = self.do(lambda: self.delivering.attempt_delivery(run), death)
        if result is not None:
            self.open_runs.remove(run)
        return result

    def lose_temporal(self) -> None:
        """Its runs are gone, and the look has found out."""
        self.open_runs.clear()
        self.transaction(forget_runs)
        self.start_runs()

    def start_runs(self) -> None:
        """As the look does: failing events that have no run get one once they are due."""
        self.clock.advance(3600)
        for receiver in self.stages:
            self.do(partial(self.retries.start_due, receiver))

    # --- redrives and rebuilds

    def redrive(self, request_id: str, chunk: int, death: Death | None = None) -> None:
        """One activity of the redrive's run."""

        async def wake(_receivers: object) -> None:
            return None

        redriving = RedriveActivities(self.writer, wake, chunk=chunk)
        self.act(redriving.redrive_chunk, RedriveInput(request_id), death)

    def begin_rebuild(self, run_id: str, message: RebuildInput, death: Death | None = None) -> RebuildReport | None:
        """The first activity of the run. Raises ApplicationError while another one runs."""
        self._activity.info = dataclasses.replace(self._activity.info, workflow_run_id=run_id)
        return self.act(self.saga.begin_rebuild, message, death)

    def phase(self, name: str, rebuild_id: str, width: int, death: Death | None = None) -> Any:
        """The activity of that name, in chunks of `width`."""
        step = RebuildStep(rebuild_id, bound=0.0, error="it was cancelled")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activities.rebuilding, "_Width", partial(_Fixed, width))
            patch.setattr(activities.rebuilding, "_READ_RANGE", width)
            return self.act(getattr(self.saga, name), step, death)

    @property
    def at_rest(self) -> bool:
        """Whether every event has its deliveries."""
        with self.database.read() as connection:
            return outbox_at_rest(connection)


class _Fixed:
    """In the place of a width that learns, which never gets as narrow as these histories are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def observe(self, seconds: float) -> None:
        """Learns nothing."""

"""A receiver that is down for a day, on a server that skips the time: nothing is spent, and order is kept."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.testing import TimeSkipper

from activities.delivering import DeliveryActivities
from activities.draining import DrainActivities
from contracts.events import Event
from contracts.messages import DeliveryInput, DrainInput, DrainReport
from contracts.names import receiver_id
from pipeline.ahead import Ahead
from pipeline.failure import RetryPolicy
from pipeline.hub import Hub
from pipeline.receiving import ReceiverStage
from pipeline.stage import Limits
from pipeline.writer import Writer
from receivers.base import Receiver, ReceiverUnavailable
from runs.starts import Runs
from store.clock import now_ms
from store.deliveries import record_failure
from store.engine import Database
from store.receivers import get_hold
from tests.store.scenes import TYPE, append, publish, register, rows, scalar, spread
from tests.waiting import eventually
from tests.workflows.workers import Attempts, events_of, workers

pytestmark = pytest.mark.anyio

DAY, LAP = timedelta(days=1), timedelta(hours=1)


class Shop(Receiver):
    """Writes down what it takes, in the order in which it takes it, unless it is down."""

    name = "shop"
    event_types = frozenset({TYPE})

    def __init__(self) -> None:
        self.down = True
        self.asked = 0
        self.taken: list[str] = []

    def deliver(self, connection: Connection, event: Event) -> None:
        self.asked += 1
        if self.down:
            raise ReceiverUnavailable("the line is dead")
        connection.exec_driver_sql(
            f"INSERT INTO mail_messages (position, order_id, subject) VALUES ({event.position}, 'o', 's')"
        )
        self.taken.append(event.event_id)


class LongDrains(DrainActivities):
    """Drains as they are, but that one which finds its receiver on hold lasts an hour (`SAISEI_DRAIN=3600`). A drain
    waits in the worker, where no time is skipped, so the server does its waiting for it."""

    def __init__(self, database: Database, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._database = database

    @activity.defn
    async def drain(self, message: DrainInput) -> DrainReport:
        with self._database.read() as connection:
            hold = get_hold(connection, "shop")
        if hold is not None and activity.info().attempt == 1:
            raise ApplicationError("it probes", next_retry_delay=LAP, category=ApplicationErrorCategory.BENIGN)
        return await super().drain(message)


async def test_a_day_on_hold_spends_nothing_and_keeps_the_order(
    skipper: TimeSkipper, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, hub, runs = Shop(), Hub(), Runs(skipper.client, ["shop"])
    register(database, "shop")
    names = [f"k{number}" for number in range(8)]
    [failed, _] = append(database, "failed", 1, 2)
    for seq in (1, 2, 3):
        for name in names:
            append(database, name, seq)
    spread(database, *publish(database))
    attempts = Attempts()
    monkeypatch.setattr("pipeline.receiving.now_ms", attempts.clock("drain"))
    monkeypatch.setattr("activities.delivering.now_ms", attempts.clock("attempt_delivery"))
    retry = RetryPolicy(5, 1800)
    writer = Writer(database)

    async def unknown(stage: str) -> None:
        raise AssertionError(f"{stage} is known")

    async def settled(receiver: str) -> None:
        await runs.wake([receiver_id(receiver)])

    stage = ReceiverStage(shop, writer, retry=retry)
    ahead = Ahead([], hub, 1, runs.wake)
    drains = LongDrains(database, [stage], hub, Limits(idle=0.02, longest=0.1), unknown, ahead)
    deliveries = DeliveryActivities(writer, {"shop": shop}, hub, retry=retry, settled=settled)
    due = now_ms()
    with database.write() as connection:
        record_failure(connection, "shop", failed.position, attempts=1, error="x", next_attempt_at=due, now=due)
    with skipper.with_time_skipping_disabled():
        event = await runs.start_delivery(DeliveryInput("shop", "failed-1", "failed"))
        await runs.wake([receiver_id("shop")])
    receiver = skipper.client.get_workflow_handle(receiver_id("shop"))

    async def details() -> str:
        metadata: Any = await receiver.query("__temporal_workflow_metadata")
        return str(metadata.current_details)

    async with workers(skipper.client, [deliveries.attempt_delivery], [drains.drain], interceptors=[attempts]):
        await eventually(lambda: attempts.of("attempt_delivery") and _held(database), 60, "the receiver is on hold")
        assert await skipper.fast_forward(event, DAY)
        assert await skipper.fast_forward(receiver, DAY)
        assert "**shop** on hold since 20" in (await details()).replace("receiver/", "")
        assert "ReceiverUnavailable: the line is dead" in await details()
        hold = _held(database)
        assert hold is not None
        assert attempts.clock("drain")() - hold.since > (DAY - LAP).total_seconds() * 1000
        assert len(attempts.of("attempt_delivery")) >= 24
        assert shop.asked >= 48  # nobody stopped asking
        assert rows(database, "SELECT DISTINCT status, attempts FROM deliveries ORDER BY 1") == [
            ("pending", 0),
            ("retrying", 1),
        ]
        assert shop.taken == []
        scheduled = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        before = len(await events_of(receiver, scheduled))

        shop.down = False
        assert await skipper.fast_forward(receiver, LAP + timedelta(seconds=5))
        await eventually(lambda: len(shop.taken) >= 24, 60, "all but what waits for the failed one")
        assert len(await events_of(receiver, scheduled)) <= before + 4  # the first drain that could, and to rest
        await skipper.fast_forward(event)
        assert (await event.result())["state"] == "done"
        await eventually(lambda: len(shop.taken) == 26, 60, "what waited behind it")
        assert "on hold" not in await details()
    writer.close()
    for name, last in [*((name, 3) for name in names), ("failed", 2)]:
        assert [each for each in shop.taken if each.startswith(f"{name}-")] == [
            f"{name}-{seq}" for seq in range(1, last + 1)
        ]
    assert rows(database, "SELECT DISTINCT status FROM deliveries") == [("done",)]
    assert rows(database, "SELECT DISTINCT attempts FROM deliveries ORDER BY 1") == [(0,), (1,)]
    assert scalar(database, "SELECT count(*) FROM mail_messages") == 26
    assert _held(database) is None


def _held(database: Database) -> Any:
    with database.read() as connection:
        return get_hold(connection, "shop")

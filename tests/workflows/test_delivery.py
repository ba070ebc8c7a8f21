"""The run of one failing event: retried over hours, then settled; by hand it takes one attempt."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from sqlalchemy import Connection
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.testing import TimeSkipper

from activities.delivering import DeliveryActivities
from contracts.events import Event
from contracts.messages import DeliveryInput, DeliveryResult
from pipeline.failure import RetryPolicy
from pipeline.hub import Hub
from pipeline.writer import Writer
from receivers.base import Receiver, ReceiverUnavailable, RejectEvent
from runs.starts import Runs
from store.deliveries import DEAD, DONE, RETRYING, record_failure
from store.engine import Database
from tests.store.scenes import delivered_to, rows, scalar
from tests.workflows.workers import workers

pytestmark = pytest.mark.anyio

HOUR = 3_600_000


class Strict(Receiver):
    """Fails as the test says; its effect is a line in `mail_messages`."""

    name = "strict"
    event_types = frozenset({"thing-happened"})

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def deliver(self, connection: Connection, event: Event) -> None:
        self.calls += 1
        connection.exec_driver_sql(
            f"INSERT INTO mail_messages (position, order_id, subject) VALUES ({event.position}, 'o', 's')"
        )
        if self.errors:
            raise self.errors.pop(0)


@dataclass
class Scene:
    """One event that failed once already at `strict`, an hour between its attempts, and a clock of its own."""

    database: Database
    receiver: Strict
    writer: Writer
    settled: list[str] = field(default_factory=list)

    def activities(self) -> list[Callable[..., object]]:
        async def settled(receiver: str) -> None:
            self.settled.append(receiver)

        own = DeliveryActivities(
            self.writer,
            {"strict": self.receiver},
            Hub(),
            retry=RetryPolicy(5, 3600),
            settled=settled,
        )
        return [own.attempt_delivery, own.deliver_by_hand]

    @property
    def row(self) -> tuple[object, ...]:
        return rows(self.database, "SELECT status, attempts, last_error FROM deliveries ORDER BY position")[0]

    @property
    def effects(self) -> int:
        return int(scalar(self.database, "SELECT count(*) FROM mail_messages"))


@pytest.fixture
def scene(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    [event] = delivered_to(sqlite, "strict", count=1)
    with sqlite.write() as connection:
        record_failure(connection, "strict", event.position, attempts=1, error="first", next_attempt_at=HOUR, now=1)
    writer = Writer(sqlite)
    # The store's clock is the wall's, which does not skip: each reading is an hour later here.
    hours = iter(range(1, 100))
    monkeypatch.setattr("activities.delivering.now_ms", lambda: next(hours) * HOUR)
    yield Scene(sqlite, Strict(), writer)
    writer.close()


MESSAGE = DeliveryInput("strict", "a-1", "a")


async def test_an_event_that_fails_for_hours_and_then_succeeds(scene: Scene, skipper: TimeSkipper) -> None:
    scene.receiver.errors = [ValueError("second"), ValueError("third")]
    async with workers(skipper.client, scene.activities()):
        handle = await Runs(skipper.client, []).start_delivery(MESSAGE)
        result = await handle.result()
    assert DeliveryResult(**result) == DeliveryResult(DONE, 3, None)
    assert scene.row == (DONE, 3, "ValueError: third")
    assert scene.effects == 1
    assert scene.settled == ["strict"]
    took = await skipper.get_current_time(handle) - (await handle.describe()).start_time
    assert timedelta(hours=1) <= took <= timedelta(hours=4)


async def test_a_run_that_begins_early_makes_its_attempt_when_that_is_due(scene: Scene, skipper: TimeSkipper) -> None:
    with scene.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE deliveries SET next_attempt_at = {2 * HOUR}")
    async with workers(skipper.client, scene.activities()):
        handle = await Runs(skipper.client, []).start_delivery(MESSAGE)
        again = await Runs(skipper.client, []).start_delivery(MESSAGE)  # starting it twice comes to one run
        assert again.first_execution_run_id == handle.first_execution_run_id
        result = await handle.result()
    assert DeliveryResult(**result) == DeliveryResult(DONE, 1)
    assert scene.effects == scene.receiver.calls == 1
    took = await skipper.get_current_time(handle) - (await handle.describe()).start_time
    assert timedelta(hours=1) <= took <= timedelta(hours=2)


async def test_a_rejected_event_is_dead_at_once(scene: Scene, skipper: TimeSkipper) -> None:
    scene.receiver.errors = [RejectEvent("no such sku")]
    async with workers(skipper.client, scene.activities()):
        result = await (await Runs(skipper.client, []).start_delivery(MESSAGE)).result()
    assert DeliveryResult(**result) == DeliveryResult(DEAD, 2, "RejectEvent: no such sku")


async def test_an_unavailable_receiver_spends_no_attempt(scene: Scene, skipper: TimeSkipper) -> None:
    scene.receiver.errors = [ReceiverUnavailable("down"), ConnectionError("refused"), TimeoutError()]
    async with workers(skipper.client, scene.activities()):
        result = await (await Runs(skipper.client, []).start_delivery(MESSAGE)).result()
    assert DeliveryResult(**result) == DeliveryResult(DONE, 1, None)
    assert scene.receiver.calls == 4


async def test_an_event_that_is_not_due_waits_and_is_not_tried(
    scene: Scene, skipper: TimeSkipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.chain([0, HOUR // 2], itertools.repeat(HOUR))
    monkeypatch.setattr("activities.delivering.now_ms", lambda: next(times))
    async with workers(skipper.client, scene.activities()):
        result = await (await Runs(skipper.client, []).start_delivery(MESSAGE)).result()
    assert result["state"] == DONE
    assert scene.receiver.calls == 1


async def test_an_unknown_receiver_is_waited_for(scene: Scene, skipper: TimeSkipper) -> None:
    activities = scene.activities()
    known = activities[0].__self__._receivers  # type: ignore[attr-defined]
    strict = known.pop("strict")
    async with workers(skipper.client, activities):
        with skipper.with_time_skipping_disabled():
            handle = await Runs(skipper.client, []).start_delivery(MESSAGE)
        assert await skipper.fast_forward(handle, timedelta(minutes=2))
        known["strict"] = strict  # a newer worker is there
        await skipper.fast_forward(handle)
        assert (await handle.result())["state"] == DONE


async def test_by_hand_a_failure_leaves_the_state_as_it_was(scene: Scene, client: Client) -> None:
    scene.receiver.errors = [ValueError("by hand")]
    by_hand = DeliveryInput("strict", "a-1", "a", manual=True)
    async with workers(client, scene.activities()):
        runs = Runs(client, [])
        with pytest.raises(WorkflowFailureError) as caught:
            await (await runs.start_delivery(by_hand)).result()
        assert isinstance(caught.value.cause, ActivityError)
        cause = caught.value.cause.cause
        assert isinstance(cause, ApplicationError)
        assert (cause.type, cause.message) == ("ReceiverFailed", "ValueError: by hand")
        assert scene.receiver.calls == 1
        assert scene.row == (RETRYING, 1, "first")
        assert scene.effects == 0
        assert (await (await runs.start_delivery(by_hand)).result())["state"] == DONE
        assert (await (await runs.start_delivery(by_hand)).result())["state"] == DONE  # and not taken twice
    assert scene.receiver.calls == 2
    assert scene.effects == 1


async def test_by_hand_an_event_waits_for_its_turn(scene: Scene, client: Client) -> None:
    delivered_to(scene.database, "strict", aggregate="b", count=2)
    async with workers(client, scene.activities()):
        with pytest.raises(WorkflowFailureError) as caught:
            await (await Runs(client, []).start_delivery(DeliveryInput("strict", "b-2", "b", manual=True))).result()
    assert isinstance(caught.value.cause, ActivityError)
    assert isinstance(caught.value.cause.cause, ApplicationError)
    assert (caught.value.cause.cause.type, str(caught.value.cause.cause)) == (
        "Refused",
        "Refused: b-2 waits behind b-1",
    )
    assert scene.receiver.calls == 0

"""`charge`, then `ship`: what is done is skipped, what fails is tried for 7 days and ends readably."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Connection
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.testing import TimeSkipper

from activities.fulfilment import FulfilmentActivities, OwnPayments, OwnShipping, PaymentSide, ShippingSide
from contracts.messages import FulfilmentInput
from contracts.search import AGGREGATE_ID, JOB
from pipeline.writer import Writer
from runs.starts import Runs
from store.engine import Database
from store.jobs import COMPLETED, FAILED, Job, begin_job, get_job, write_shipment
from tests.store.scenes import scalar
from tests.waiting import eventually
from tests.workflows.workers import Attempts, events_of, workers

pytestmark = pytest.mark.anyio


class Carrier(ShippingSide):
    """Refuses the first `refusals` requests."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.keys: list[str] = []

    def request(self, key: str) -> None:
        self.keys.append(key)
        if len(self.keys) <= self.refusals:
            raise ValueError("the lorry is broken")

    def record(self, connection: Connection, job_id: str, now: int) -> None:
        write_shipment(connection, job_id, now)


class Bank(OwnPayments):
    """As Carrier, for the charge."""

    def __init__(self) -> None:
        self.refusals = 0
        self.keys: list[str] = []

    def request(self, key: str, amount: int) -> None:
        self.keys.append(key)
        if len(self.keys) <= self.refusals:
            raise ConnectionError("the bank is closed for a moment")


class Torn(OwnShipping):
    """Our own side: the first `left` shipments fail after they were written."""

    def __init__(self, left: int) -> None:
        self.left = left

    def record(self, connection: Connection, job_id: str, now: int) -> None:
        super().record(connection, job_id, now)
        self.left -= 1
        if self.left >= 0:
            raise ValueError("the label is torn")


class Scene:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.carrier = Carrier()
        self.bank = Bank()
        self.sides: tuple[PaymentSide, ShippingSide] = (self.bank, self.carrier)
        self.writer = Writer(database)

    def activities(self) -> list[Callable[..., object]]:
        own = FulfilmentActivities(self.writer, *self.sides)
        return [own.fulfil, own.charge, own.ship, own.end_job]

    def begin(self) -> None:
        with self.database.write() as connection:
            begin_job(connection, "job-1", 100, 1, 1)

    @property
    def job(self) -> Job:
        with self.database.read() as connection:
            return get_job(connection, "job-1")


@pytest.fixture
def scene(sqlite: Database) -> Iterator[Scene]:
    scene = Scene(sqlite)
    scene.begin()
    yield scene
    scene.writer.close()


def failure_of(error: WorkflowFailureError) -> ApplicationError:
    assert isinstance(error.cause, ApplicationError)
    assert error.cause.type == "StepFailed"
    return error.cause


async def test_a_job_is_charged_and_shipped_and_found_by_its_id(scene: Scene, client: Client) -> None:
    async with workers(client, scene.activities()):
        handle = await Runs(client, []).start_job(FulfilmentInput("job-1", 100))
        assert await handle.result() == {"charge": "committed", "ship": "completed"}
        described = await handle.describe()
        assert described.typed_search_attributes[JOB] == "job-1"
        assert described.typed_search_attributes[AGGREGATE_ID] == "job/job-1"
        assert await described.static_summary() == "charge and ship job-1"
    assert scene.job.steps == ("charge", "ship")
    assert scene.job.charges == (("job-1", 100),)
    assert scene.job.state == COMPLETED


async def test_a_charge_that_fails_at_first_is_tried_until_it_goes_well(scene: Scene, client: Client) -> None:
    scene.bank.refusals = 3  # the first try at both steps, and two of the charge's own
    async with workers(client, scene.activities()):
        handle = await Runs(client, []).start_job(FulfilmentInput("job-1", 100))
        assert await handle.result() == {"charge": "committed", "ship": "completed"}
    assert scene.bank.keys == ["job/job-1/charge"] * 4
    assert scene.job.state == COMPLETED
    assert scene.job.charges == (("job-1", 100),)


async def test_a_shipment_of_our_own_that_fails_leaves_each_step_to_its_own_activity(
    scene: Scene, client: Client
) -> None:
    scene.sides = (OwnPayments(), Torn(2))  # with the charge, and by itself
    async with workers(client, scene.activities()):
        handle = await Runs(client, []).start_job(FulfilmentInput("job-1", 100))
        assert await handle.result() == {"charge": "committed", "ship": "completed"}
        scheduled = await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)
    names = [event.activity_task_scheduled_event_attributes.activity_type.name for event in scheduled]
    assert names == ["charge", "ship", "end_job"]
    assert scene.job.state == COMPLETED
    assert scene.job.charges == (("job-1", 100),)
    assert scalar(scene.database, "SELECT count(*) FROM shipments") == 1


async def test_shipping_that_fails_for_days_then_succeeds(scene: Scene, skipper: TimeSkipper) -> None:
    scene.carrier.refusals = 60
    async with workers(skipper.client, scene.activities()):
        handle = await Runs(skipper.client, []).start_job(FulfilmentInput("job-1", 100))
        assert await handle.result() == {"charge": "committed", "ship": "completed"}
        took = await skipper.get_current_time(handle) - (await handle.describe()).start_time
        assert timedelta(days=1) < took < timedelta(days=3)
    assert set(scene.carrier.keys) == {"job/job-1/ship"}  # the same key at every attempt
    assert len(scene.carrier.keys) == 61
    assert scalar(scene.database, "SELECT count(*) FROM shipments") == 1


async def test_shipping_that_fails_for_7_days_ends_readably_and_a_second_run_resumes_it(
    scene: Scene, skipper: TimeSkipper
) -> None:
    scene.carrier.refusals = 10_000
    attempts = Attempts()
    async with workers(skipper.client, scene.activities(), interceptors=[attempts]):
        runs = Runs(skipper.client, [])
        handle = await runs.start_job(FulfilmentInput("job-1", 100))
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
        failure = failure_of(caught.value)
        assert failure.details == ({"charge": "committed", "ship": "failed"},)
        assert failure.message == "ship failed: ValueError: the lorry is broken; `job run job-1` resumes it"
        took = await skipper.get_current_time(handle) - (await handle.describe()).start_time
        assert timedelta(days=6, hours=22) < took < timedelta(days=7, hours=1)
        # Doubling from a second up to an hour.
        assert len(attempts.of("ship")) + 1 == len(scene.carrier.keys) == 7 * 24 + 12
        assert attempts.keep("ship", [min(2.0**n, 3600.0) for n in range(7 * 24 + 10)]), attempts.pauses("ship")
        assert scene.job.state == FAILED
        assert scene.job.error == "ship failed: ValueError: the lorry is broken"
        assert scene.job.steps == ("charge",)

        scene.begin()  # `job run` again
        scene.carrier.refusals = 0
        resumed = await runs.start_job(FulfilmentInput("job-1", 100))
        assert await resumed.result() == {"charge": "already_completed", "ship": "completed"}
    assert scene.job.state == COMPLETED
    assert scene.job.error is None
    assert scene.job.charges == (("job-1", 100),)


async def test_a_drill_fails_at_its_only_attempt_at_shipping(scene: Scene, client: Client) -> None:
    message = FulfilmentInput("job-1", 100, ship_fails=True, ship_attempts=1)
    async with workers(client, scene.activities()):
        handle = await Runs(client, []).start_job(message)
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
        failure = failure_of(caught.value)
        assert failure.details == ({"charge": "committed", "ship": "failed"},)
        scheduled = await events_of(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)
        attributes = [event.activity_task_scheduled_event_attributes for event in scheduled]
        assert [(each.activity_type.name, each.retry_policy.maximum_attempts) for each in attributes] == [
            ("charge", 0),
            ("ship", 1),
            ("end_job", 0),
        ]
    assert scene.carrier.keys == []
    assert scene.job.state == FAILED


@pytest.mark.parametrize("attempts", [1, 3])
async def test_so_many_attempts_at_shipping_are_so_many(scene: Scene, skipper: TimeSkipper, attempts: int) -> None:
    scene.carrier.refusals = 100
    async with workers(skipper.client, scene.activities()):
        handle = await Runs(skipper.client, []).start_job(FulfilmentInput("job-1", 100, ship_attempts=attempts))
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert len(scene.carrier.keys) == attempts
    assert scene.job.charges == (("job-1", 100),)


async def test_a_job_that_is_not_recorded_fails_readably(sqlite: Database, client: Client) -> None:
    scene = Scene(sqlite)
    async with workers(client, scene.activities()):
        handle = await Runs(client, []).start_job(FulfilmentInput("job-2", 100))
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert "there is no job job-2" in str(caught.value.cause.cause)  # type: ignore[union-attr]
    scene.writer.close()


async def test_two_starts_of_one_job_are_one_run(scene: Scene, client: Client) -> None:
    runs = Runs(client, [])
    first = await runs.start_job(FulfilmentInput("job-1", 100))
    second = await runs.start_job(FulfilmentInput("job-1", 100))
    assert first.result_run_id == second.result_run_id
    async with workers(client, scene.activities()):
        await first.result()
    assert scalar(scene.database, "SELECT count(*) FROM charges") == 1


async def test_a_job_that_is_cancelled_while_it_ships_says_so_and_can_be_run_again(
    scene: Scene, skipper: TimeSkipper
) -> None:
    scene.carrier.refusals = 3
    async with workers(skipper.client, scene.activities()):
        runs = Runs(skipper.client, [])
        with skipper.with_time_skipping_disabled():
            handle = await runs.start_job(FulfilmentInput("job-1", 100))
        await eventually(lambda: scene.carrier.keys, 60, "the first attempt at shipping")
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert scene.job.state == FAILED
        assert "ancelled" in str(scene.job.error)
        scene.begin()
        resumed = await runs.start_job(FulfilmentInput("job-1", 100))
        assert await resumed.result() == {"charge": "already_completed", "ship": "completed"}
    assert scene.job.charges == (("job-1", 100),)

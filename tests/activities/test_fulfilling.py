"""Both steps of a job at once: what is durable when, and what stays when one of them does not go well."""

from collections.abc import Awaitable, Callable, Iterator

import pytest
from sqlalchemy import Connection
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.fulfilment import FulfilmentActivities, OwnPayments, OwnShipping, PaymentSide, ShippingSide
from contracts.errors import StoreBusy
from contracts.messages import FulfilmentResult, StepInput
from pipeline.writer import Writer
from store.engine import Database
from store.jobs import begin_job, get_job
from tests.store.scenes import rows, scalar

pytestmark = pytest.mark.anyio

Fulfil = Callable[..., Awaitable[FulfilmentResult]]
CHARGED, SHIPPED = "SELECT count(*) FROM charges", "SELECT count(*) FROM shipments"


class Carrier(OwnShipping):
    """Is asked, and sees then what is in the database already."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.saw: list[int] = []

    def request(self, key: str) -> None:
        self.saw.append(scalar(self._database, CHARGED))


class Bank(OwnPayments):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def request(self, key: str, amount: int) -> None:
        self.asked += 1


class Torn(OwnShipping):
    """Fails after it wrote the shipment, until it is mended."""

    broken = True

    def record(self, connection: Connection, job_id: str, now: int) -> None:
        super().record(connection, job_id, now)
        if self.broken:
            raise ValueError("the label is torn")


@pytest.fixture
def fulfil(database: Database) -> Iterator[Fulfil]:
    """`fulfil(payments, shipping, fails)` runs the activity for `job-1`."""
    with database.write() as connection:
        begin_job(connection, "job-1", 100, 1, 1)
    writer = Writer(database)

    async def run(
        payments: PaymentSide | None = None, shipping: ShippingSide | None = None, fails: bool = False
    ) -> FulfilmentResult:
        own = FulfilmentActivities(writer, payments or OwnPayments(), shipping or OwnShipping())
        return await ActivityEnvironment().run(own.fulfil, StepInput("job-1", 100, fails))

    yield run
    writer.close()


async def test_a_job_that_asks_nobody_outside_is_there_as_a_whole_or_not_at_all(
    database: Database, fulfil: Fulfil
) -> None:
    seen: list[tuple[int, int]] = []

    class Looking(OwnShipping):
        def record(self, connection: Connection, job_id: str, now: int) -> None:
            super().record(connection, job_id, now)
            seen.append((scalar(database, CHARGED), scalar(database, SHIPPED)))  # as others see it

    assert await fulfil(shipping=Looking()) == FulfilmentResult("committed", "completed")
    assert seen == [(0, 0)]
    with database.read() as connection:
        job = get_job(connection, "job-1")
    assert (job.state, job.steps, job.charges) == ("COMPLETED", ("charge", "ship"), (("job-1", 100),))
    told = rows(database, "SELECT event_id, seq FROM outbox ORDER BY seq")
    assert told == [("job-1:payment-captured", 1), ("job-1:order-shipped", 2)]
    assert await fulfil(shipping=Looking()) == FulfilmentResult("already_completed", "completed")
    assert len(seen) == 1


async def test_the_carrier_hears_of_a_job_only_once_its_charge_is_durable(database: Database, fulfil: Fulfil) -> None:
    carrier = Carrier(database)
    assert await fulfil(shipping=carrier) == FulfilmentResult("committed", "completed")
    assert carrier.saw == [1]
    assert await fulfil(shipping=carrier) == FulfilmentResult("already_completed", "completed")
    assert carrier.saw == [1]  # it was shipped: nobody is asked again


async def test_a_bank_is_asked_once_for_a_job_that_was_charged(database: Database, fulfil: Fulfil) -> None:
    bank = Bank()
    assert await fulfil(payments=bank) == FulfilmentResult("committed", "completed")
    assert await fulfil(payments=bank) == FulfilmentResult("already_completed", "completed")
    assert bank.asked == 1
    assert scalar(database, CHARGED) == 1


async def test_a_shipment_of_our_own_that_fails_takes_its_charge_along(database: Database, fulfil: Fulfil) -> None:
    torn = Torn()
    with pytest.raises(ValueError, match="the label is torn"):
        await fulfil(shipping=torn)
    with database.read() as connection:
        job = get_job(connection, "job-1")
    assert (job.state, job.steps, job.charges) == ("RUNNING", (), ())
    assert (scalar(database, SHIPPED), rows(database, "SELECT * FROM outbox")) == (0, [])
    torn.broken = False
    assert await fulfil(shipping=torn) == FulfilmentResult("committed", "completed")
    assert (scalar(database, CHARGED), scalar(database, SHIPPED)) == (1, 1)


async def test_what_the_bank_took_is_kept_when_the_shipment_fails(database: Database, fulfil: Fulfil) -> None:
    bank, torn = Bank(), Torn()
    assert await fulfil(bank, torn) == FulfilmentResult("committed", "failed")
    with database.read() as connection:
        job = get_job(connection, "job-1")
    assert (job.state, job.steps, job.charges) == ("RUNNING", ("charge",), (("job-1", 100),))
    assert scalar(database, SHIPPED) == 0
    torn.broken = False
    assert await fulfil(bank, torn) == FulfilmentResult("already_completed", "completed")
    assert (scalar(database, CHARGED), scalar(database, SHIPPED)) == (1, 1)
    assert bank.asked == 1


async def test_a_drill_fails_after_the_charge(database: Database, fulfil: Fulfil) -> None:
    assert await fulfil(fails=True) == FulfilmentResult("committed", "failed")
    assert (scalar(database, CHARGED), scalar(database, SHIPPED)) == (1, 0)


async def test_a_shipment_that_our_own_database_could_not_take_is_left_to_be_tried_again(
    database: Database, fulfil: Fulfil
) -> None:
    class Lost(OwnShipping):
        def record(self, connection: Connection, job_id: str, now: int) -> None:
            raise StoreBusy("the disk is slow")

    bank = Bank()
    assert await fulfil(bank, Lost()) == FulfilmentResult("committed", "failed")
    assert (scalar(database, CHARGED), scalar(database, SHIPPED)) == (1, 0)
    assert await fulfil(bank) == FulfilmentResult("already_completed", "completed")
    assert (scalar(database, CHARGED), scalar(database, SHIPPED)) == (1, 1)


async def test_a_job_that_nobody_began_is_not_tried_again(database: Database, fulfil: Fulfil) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")
    with pytest.raises(ApplicationError, match="there is no job job-1") as caught:
        await fulfil()
    assert caught.value.non_retryable
    assert scalar(database, CHARGED) == 0

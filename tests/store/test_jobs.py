"""Jobs: charged once, shipped after the charge, run again without doing anything twice."""

import pytest
from sqlalchemy.exc import IntegrityError

from contracts.errors import Conflict, NotFound, Refused
from contracts.names import CHARGE, SHIP
from store.engine import Database
from store.jobs import (
    begin_job,
    complete_charge,
    complete_ship,
    completed_steps,
    due_for_look,
    end_job,
    get_job,
    postpone_look,
    write_charge,
    write_shipment,
)
from store.outbox import events_of
from tests.store.scenes import rows, together


def _begin(database: Database, job_id: str = "job-1", amount: int = 100, look_at: int = 50) -> None:
    with database.write() as connection:
        begin_job(connection, job_id, amount, now=1, look_at=look_at)


def charge(database: Database, job_id: str = "job-1", amount: int = 100) -> str:
    """As the activity does it: look under the lock, then the charge, the step and the event at once."""
    with database.write() as connection:
        if CHARGE in completed_steps(connection, job_id):
            return "already_completed"
        write_charge(connection, job_id, amount, 2)
        complete_charge(connection, job_id, amount, 2)
    return "committed"


def ship(database: Database, job_id: str = "job-1") -> str:
    with database.write() as connection:
        if SHIP not in completed_steps(connection, job_id):
            write_shipment(connection, job_id, 3)
            complete_ship(connection, job_id, 3)
    return "completed"


def _job(database: Database, job_id: str = "job-1"):  # type: ignore[no-untyped-def]
    with database.read() as connection:
        return get_job(connection, job_id)


def test_a_job_is_charged_then_shipped_and_tells_both(database: Database) -> None:
    _begin(database)
    assert (charge(database), ship(database)) == ("committed", "completed")
    job = _job(database)
    assert (job.amount, job.state, job.steps, job.charges) == (100, "RUNNING", ("charge", "ship"), (("job-1", 100),))
    with database.read() as connection:
        told = events_of(connection, "job/job-1")
    assert [(row.event.event_id, row.event.event_type, row.event.payload) for row in told] == [
        ("job-1:payment-captured", "payment-captured", {"job_id": "job-1", "amount": 100}),
        ("job-1:order-shipped", "order-shipped", {"job_id": "job-1"}),
    ]


def test_run_again_a_job_skips_what_is_done(database: Database) -> None:
    for expected in ("committed", "already_completed", "already_completed"):
        _begin(database)
        assert (charge(database), ship(database)) == (expected, "completed")
        with database.write() as connection:
            end_job(connection, "job-1", None)
        assert _job(database).state == "COMPLETED"
    assert len(rows(database, "SELECT 1 FROM charges")) == len(rows(database, "SELECT 1 FROM shipments")) == 1
    assert len(rows(database, "SELECT 1 FROM outbox")) == 2


def test_another_amount_is_a_conflict_before_anything_changes(database: Database) -> None:
    _begin(database)
    charge(database)
    with database.write() as connection:
        end_job(connection, "job-1", "no truck")
    before = _job(database)
    with pytest.raises(Conflict, match="amount 100, not 200"):
        _begin(database, amount=200)
    assert _job(database) == before


def test_threads_that_begin_one_job_with_two_amounts_begin_it_with_one(database: Database) -> None:
    results = together(*[lambda amount=amount: _begin(database, amount=amount) for amount in (1, 2, 1, 2)])
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Conflict", "NoneType", "NoneType"]


def test_threads_charge_once_and_ship_once(database: Database) -> None:
    _begin(database)
    assert sorted(together(*[lambda: charge(database)] * 6)) == ["already_completed"] * 5 + ["committed"]
    assert together(*[lambda: ship(database)] * 6) == ["completed"] * 6
    assert _job(database).charges == (("job-1", 100),)
    assert len(rows(database, "SELECT 1 FROM shipments")) == 1


def test_without_looking_first_a_second_charge_is_still_refused(database: Database) -> None:
    _begin(database)
    charge(database)
    for write in (write_charge, complete_charge):
        with database.write() as connection, pytest.raises(IntegrityError):
            write(connection, "job-1", 100, 9)
    assert _job(database).charges == (("job-1", 100),)


def test_nothing_ships_before_its_charge(database: Database) -> None:
    _begin(database)
    with pytest.raises(Refused, match="not charged yet"):
        ship(database)
    assert (rows(database, "SELECT 1 FROM shipments"), _job(database).steps) == ([], ())


def test_a_charge_that_is_rolled_back_leaves_no_step_and_no_event(database: Database) -> None:
    _begin(database)
    with database.write() as connection:
        savepoint = connection.begin_nested()
        write_charge(connection, "job-1", 100, 2)
        complete_charge(connection, "job-1", 100, 2)
        savepoint.rollback()
    assert (_job(database).steps, _job(database).charges) == ((), ())
    assert rows(database, "SELECT 1 FROM outbox") == []
    assert charge(database) == "committed"


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "COMPLETED"), ("the truck is broken", "FAILED"), ("", "FAILED"), ("a\0\ud800", "FAILED")],
)
def test_a_run_ends_completed_or_failed_with_its_error(database: Database, error: str | None, state: str) -> None:
    _begin(database)
    with database.write() as connection:
        end_job(connection, "job-1", error)
    assert _job(database).state == state
    assert (_job(database).error is None) == (error is None)
    _begin(database)
    assert (_job(database).state, _job(database).error) == ("RUNNING", None)


def test_the_look_finds_running_jobs_that_are_due_oldest_first(database: Database) -> None:
    for number, look_at in ((1, 30), (2, 10), (3, 20), (4, 90)):
        _begin(database, f"job-{number}", number, look_at)
    _begin(database, "job-5", 5, 1)
    with database.write() as connection:
        end_job(connection, "job-5", None)
        assert due_for_look(connection, 30, 10) == [("job-2", 2), ("job-3", 3), ("job-1", 1)]
        assert due_for_look(connection, 30, 2) == [("job-2", 2), ("job-3", 3)]
        postpone_look(connection, "job-2", 99)
        assert due_for_look(connection, 30, 10) == [("job-3", 3), ("job-1", 1)]
        assert due_for_look(connection, 5, 10) == []


def test_a_job_that_is_not_there_is_not_found(database: Database) -> None:
    with pytest.raises(NotFound, match="no job job-9"):
        _job(database, "job-9")
    with database.write() as connection, pytest.raises(NotFound, match="no job job-9"):
        completed_steps(connection, "job-9")
    with pytest.raises(NotFound):
        charge(database, "job-9")

"""The resumable `charge` -> `ship` job: its row is written before its run starts, so it outlives a lost Temporal."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import Conflict, NotFound, Refused
from contracts.events import ORDER_SHIPPED, PAYMENT_CAPTURED
from contracts.identifiers import job_aggregate, order_shipped_id, payment_captured_id
from contracts.names import CHARGE, SHIP
from store.dialect import MAX_ERROR, Rendered, for_update, insert, storable
from store.outbox import append_event
from store.schema import charges, job_steps, jobs, shipments

# How long (ms) the look leaves a job alone after it was asked for, or was seen running.
JOB_LOOK_MS = 30_000

RUNNING, COMPLETED, FAILED = "RUNNING", "COMPLETED", "FAILED"
_STEP_POSITIONS = {CHARGE: 1, SHIP: 2}


@dataclass(frozen=True)
class Job:
    """A job and what it has completed, in the order of the work. `created_at`: UTC ms."""

    job_id: str
    amount: int
    state: str
    error: str | None
    created_at: int
    steps: tuple[str, ...]
    charges: tuple[tuple[str, int], ...]


def _begin(connection: Connection) -> Any:
    statement = insert(connection, jobs)
    return statement.on_conflict_do_update(
        index_elements=["job_id"],
        set_={"state": statement.excluded.state, "error": sa.null(), "look_at": statement.excluded.look_at},
        where=jobs.c.amount == statement.excluded.amount,
    ).returning(jobs.c.job_id)


_OF_JOB = sa.bindparam("job_id", type_=sa.Text)
_AMOUNT = sa.select(jobs.c.amount).where(jobs.c.job_id == _OF_JOB)
_JOB = sa.select(jobs.c.job_id).where(jobs.c.job_id == _OF_JOB)
# What every job runs.
_BEGIN = Rendered(_begin, "job_id", "amount", "state", "created_at", "look_at")
_FIND = Rendered(lambda _: _JOB, "job_id")
_LOCK = Rendered(lambda connection: for_update(connection, _JOB), "job_id")
_STEPS = Rendered(lambda _: sa.select(job_steps.c.step).where(job_steps.c.job_id == _OF_JOB), "job_id")
_COMPLETE_STEP = Rendered(lambda _: sa.insert(job_steps).inline(), "job_id", "step", "position", "completed_at")
_CHARGE = Rendered(lambda _: sa.insert(charges).inline(), "job_id", "amount", "charged_at")
_SHIPMENT = Rendered(lambda _: sa.insert(shipments).inline(), "job_id", "shipped_at")
_END = Rendered(
    lambda _: (
        sa.update(jobs)
        .where(jobs.c.job_id == _OF_JOB)
        .values(state=sa.bindparam("to_state"), error=sa.bindparam("reason"))
    ),
    "to_state",
    "reason",
    "job_id",
)


def begin_job(connection: Connection, job_id: str, amount: int, now: int, look_at: int) -> None:
    """Record that the job is to run; a job that was recorded with this amount runs again, and skips what is done.

    `look_at` (UTC ms): when the look first makes sure that it has a run; `now + JOB_LOOK_MS`, so that the look can
    tell a run that ended since from an older one. Raises Conflict for another amount.
    """
    if not _BEGIN.rows(connection, job_id, amount, RUNNING, now, look_at):
        stored = connection.execute(_AMOUNT, {"job_id": job_id}).scalar_one()
        raise Conflict(f"job {job_id} was started before with amount {stored}, not {amount}; nothing was changed")


def completed_steps(connection: Connection, job_id: str, *, lock: bool = True) -> frozenset[str]:
    """The steps that are recorded as done. `lock` keeps others off the job until the transaction ends.

    Raises NotFound.
    """
    if not (_LOCK if lock else _FIND).rows(connection, job_id):
        raise NotFound(f"there is no job {job_id}; `job run` starts one")
    # A statement of its own: one that had waited for the lock would show the steps of before its wait.
    return _steps(connection, job_id)


def complete_charge(connection: Connection, job_id: str, amount: int, now: int) -> None:
    """The step and its `payment-captured` event, in the transaction of the charge."""
    _complete_step(connection, job_id, CHARGE, now)
    append_event(
        connection,
        event_id=payment_captured_id(job_id),
        aggregate_id=job_aggregate(job_id),
        event_type=PAYMENT_CAPTURED,
        payload={"job_id": job_id, "amount": amount},
    )


def complete_ship(connection: Connection, job_id: str, now: int) -> None:
    """The step and its `order-shipped` event, in the transaction of the shipment. Raises Refused before the charge."""
    if CHARGE not in _steps(connection, job_id):
        raise Refused(f"job {job_id} is not charged yet, so it cannot be shipped")
    _complete_step(connection, job_id, SHIP, now)
    append_event(
        connection,
        event_id=order_shipped_id(job_id),
        aggregate_id=job_aggregate(job_id),
        event_type=ORDER_SHIPPED,
        payload={"job_id": job_id},
    )


def write_charge(connection: Connection, job_id: str, amount: int, now: int) -> None:
    """The built-in payment side: a row of our own; a second one for the job is refused by its key."""
    _CHARGE.each(connection, [(job_id, amount, now)])


def write_shipment(connection: Connection, job_id: str, now: int) -> None:
    """The built-in shipping side: a row of our own."""
    _SHIPMENT.each(connection, [(job_id, now)])


def end_job(connection: Connection, job_id: str, error: str | None) -> None:
    """The run is over: COMPLETED, or FAILED with a sentence; `job run` runs it again."""
    if error is None:
        _END.each(connection, [(COMPLETED, None, job_id)])
    else:
        _END.each(connection, [(FAILED, storable(error, MAX_ERROR), job_id)])


def settle_lost_job(connection: Connection, job_id: str, error: str | None, now: int) -> None:
    """The job's run was found ended, without its outcome in the row. Changes nothing when the run wrote one after all,
    or when the job was begun again, since it became due for the look at `now` (UTC ms)."""
    still_due = connection.execute(
        for_update(
            connection,
            sa.select(jobs.c.job_id).where(jobs.c.job_id == job_id, jobs.c.state == RUNNING, jobs.c.look_at <= now),
        )
    ).one_or_none()
    if still_due is not None:
        end_job(connection, job_id, error)


def due_for_look(connection: Connection, now: int, limit: int) -> list[tuple[str, int]]:
    """(job id, amount) of running jobs that the look is to find a run for, oldest first."""
    return [
        (row[0], row[1])
        for row in connection.execute(
            sa.select(jobs.c.job_id, jobs.c.amount)
            .where(sa.text("jobs.state = 'RUNNING'"), jobs.c.look_at <= now)
            .order_by(jobs.c.look_at)
            .limit(limit)
        )
    ]


def asked_for_at(connection: Connection, job_id: str) -> int:
    """When (UTC ms) the job was last asked for or seen running: a run that ended before is not the one asked for."""
    look_at: int = connection.execute(sa.select(jobs.c.look_at).where(jobs.c.job_id == job_id)).scalar_one()
    return look_at - JOB_LOOK_MS


def postpone_look(connection: Connection, job_id: str, look_at: int) -> None:
    """The job has a run; look again at `look_at` (UTC ms)."""
    connection.execute(sa.update(jobs).where(jobs.c.job_id == job_id).values(look_at=look_at))


def count_jobs(connection: Connection) -> dict[str, int]:
    """State -> how many jobs are in it, states in use only."""
    rows = connection.execute(sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state).order_by(jobs.c.state))
    return {row[0]: row[1] for row in rows}


def hasten_looks(connection: Connection, now: int) -> None:
    """Temporal lost its runs: the look makes sure of every running job from `now` (UTC ms) on."""
    connection.execute(sa.update(jobs).where(sa.text("state = 'RUNNING'"), jobs.c.look_at > now).values(look_at=now))


def get_job(connection: Connection, job_id: str) -> Job:
    """The job with its steps and charges. Raises NotFound."""
    row = connection.execute(
        sa.select(jobs.c.job_id, jobs.c.amount, jobs.c.state, jobs.c.error, jobs.c.created_at).where(
            jobs.c.job_id == job_id
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job_id}; `job run` starts one")
    steps = connection.execute(
        sa.select(job_steps.c.step).where(job_steps.c.job_id == job_id).order_by(job_steps.c.position)
    ).scalars()
    charged = connection.execute(sa.select(charges.c.job_id, charges.c.amount).where(charges.c.job_id == job_id))
    return Job(*row, steps=tuple(steps), charges=tuple((c[0], c[1]) for c in charged))


def _steps(connection: Connection, job_id: str) -> frozenset[str]:
    return frozenset(row[0] for row in _STEPS.rows(connection, job_id))


def _complete_step(connection: Connection, job_id: str, step: str, now: int) -> None:
    _COMPLETE_STEP.each(connection, [(job_id, step, _STEP_POSITIONS[step], now)])

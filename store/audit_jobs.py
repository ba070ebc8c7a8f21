"""I5: at most one charge a job, shipped only after it was charged, and each step told of by its event."""

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_SHIPPED, PAYMENT_CAPTURED
from contracts.names import CHARGE, SHIP
from store.audit_findings import Audit, Check, business_key
from store.jobs import COMPLETED
from store.schema import charges, job_steps, jobs, outbox, shipments


def _done(job_id: sa.ColumnElement[str], name: str) -> sa.Exists:
    step = job_steps.alias()
    return sa.exists().select_from(step).where(step.c.job_id == job_id, step.c.step == name)


# Made once: making them anew takes longer than running them.
_CHECKS = tuple(
    Check("I5", what, names)
    for what, names in (
        (
            "charges of another amount than their job's",
            sa.select(charges.c.job_id)
            .join_from(charges, jobs, jobs.c.job_id == charges.c.job_id)
            .where(jobs.c.amount != charges.c.amount),
        ),
        (
            "charges without a job that records them",
            sa.select(charges.c.job_id).where(~_done(charges.c.job_id, CHARGE)),
        ),
        (
            "shipments without a job that records them",
            sa.select(shipments.c.job_id).where(~_done(shipments.c.job_id, SHIP)),
        ),
        (
            "jobs shipped and not charged",
            sa.select(job_steps.c.job_id).where(job_steps.c.step == SHIP, ~_done(job_steps.c.job_id, CHARGE)),
        ),
        (
            "steps of no job",
            sa.select(job_steps.c.job_id)
            .distinct()
            .where(~sa.exists().select_from(jobs).where(jobs.c.job_id == job_steps.c.job_id)),
        ),
        (
            f"jobs {COMPLETED} and not shipped",
            sa.select(jobs.c.job_id).where(jobs.c.state == COMPLETED, ~_done(jobs.c.job_id, SHIP)),
        ),
    )
)


def _untold(step: str, event_type: str) -> Check:
    told = (
        sa.exists()
        .select_from(outbox)
        .where(outbox.c.event_id == job_steps.c.job_id + f":{event_type}", outbox.c.event_type == event_type)
    )
    names = sa.select(job_steps.c.job_id).where(job_steps.c.step == step, ~told)
    return Check("I5", f"jobs whose step {step} has no {event_type} event", names)


def _unfounded(step: str, event_type: str) -> Check:
    names = sa.select(outbox.c.event_id).where(
        outbox.c.event_type == event_type, ~_done(business_key(f":{event_type}"), step)
    )
    return Check("I5", f"{event_type} events of no job's step {step}", names)


# A step and its event are written in one transaction.
_TOLD = {
    step: (event_type, _untold(step, event_type), _unfounded(step, event_type))
    for step, event_type in ((CHARGE, PAYMENT_CAPTURED), (SHIP, ORDER_SHIPPED))
}


def check_jobs(connection: Connection, found: Audit, events: dict[str, int]) -> None:
    """Note what does not hold in `found`. `events`: event type -> how many events there are of it."""
    found.jobs, found.charges, found.shipments = (
        connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        for table in (jobs, charges, shipments)
    )
    found.look_for(connection, *_CHECKS)
    steps: dict[str, int] = {
        row[0]: row[1]
        for row in connection.execute(sa.select(job_steps.c.step, sa.func.count()).group_by(job_steps.c.step))
    }
    for step, (event_type, untold, unfounded) in _TOLD.items():
        broken = len(found.breaks)
        found.look_for(connection, untold)
        # Each step has its event: if there are as many, each event has its step.
        if len(found.breaks) > broken or steps.get(step, 0) != events.get(event_type, 0):
            found.look_for(connection, unfounded)

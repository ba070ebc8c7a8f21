"""What is unfinished in the database, at one instant: all that the look goes by.

Nothing of it depends on the clock, so only a commit changes it. What is due by it, the reader's clock tells.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from store.deliveries import Retrying, first_next, retrying_of
from store.dialect import Rendered
from store.outbox import NOT_FANNED_OUT
from store.rebuild import Rebuild, running_rebuild
from store.schema import jobs, outbox, redrives


@dataclass(frozen=True)
class Unfinished:
    """The first of each kind, or None where there is none. Times: UTC ms."""

    pending: int | None  # position of the event that waits for the relay
    published_at: int | None  # when the event was pushed that is in Redis for longest
    jobs_look_at: int | None  # when the look is to make sure of a running job
    redrives_look_at: int | None
    rebuild: Rebuild | None
    next: Mapping[str, int | None]  # receiver -> position of the event that it may take now
    retrying: Mapping[str, Retrying]


_PENDING, _IN_FLIGHT = NOT_FANNED_OUT
_FIRSTS = Rendered(
    lambda _: sa.select(
        sa.select(sa.func.min(outbox.c.position)).where(sa.text(_PENDING)).scalar_subquery(),
        sa.select(sa.func.min(outbox.c.published_at)).where(sa.text(_IN_FLIGHT)).scalar_subquery(),
        sa.select(sa.func.min(jobs.c.look_at)).where(sa.text("jobs.state = 'RUNNING'")).scalar_subquery(),
        sa.select(sa.func.min(redrives.c.look_at)).where(sa.text("redrives.state = 'RUNNING'")).scalar_subquery(),
    )
)


def unfinished(connection: Connection, receivers: Iterable[str]) -> Unfinished:
    """What is unfinished, at these receivers and before them."""
    names = tuple(receivers)
    ((pending, published_at, jobs_look_at, redrives_look_at),) = _FIRSTS.rows(connection)
    return Unfinished(
        pending,
        published_at,
        jobs_look_at,
        redrives_look_at,
        running_rebuild(connection),
        {name: first_next(connection, name) for name in names},
        {name: retrying_of(connection, name) for name in names},
    )

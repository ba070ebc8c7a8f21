"""The control row: intake's state, the active generation, the pipeline's lease. One row, made by `init`."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.errors import NotFound, Refused
from store.dialect import Rendered, insert, lock_intake
from store.schema import INITIAL, OPEN, PAUSED, control, generations, metadata, rebuilds

OPERATOR = "operator"


@dataclass(frozen=True)
class Control:
    """The control row as one read saw it. `hot_until`: UTC ms."""

    intake: str
    paused_by: str | None
    active_generation: str
    epoch: int
    hot_until: int


def initialize(connection: Connection, now: int) -> None:
    """Tables, the control row and the first generation; changes nothing the second time."""
    lock_intake(connection, exclusive=True)  # two that create one table at once fail on PostgreSQL
    metadata.create_all(connection)
    connection.execute(
        insert(connection, generations)
        .values(generation=INITIAL, state="ACTIVE", created_at=now)
        .on_conflict_do_nothing()
    )
    connection.execute(
        insert(connection, control)
        .values(id=1, intake=OPEN, active_generation=INITIAL, epoch=0, hot_until=0)
        .on_conflict_do_nothing()
    )


# As `Control` has them.
COLUMNS = (control.c.intake, control.c.paused_by, control.c.active_generation, control.c.epoch, control.c.hot_until)
_READ = Rendered(lambda _: sa.select(*COLUMNS))


def read_control(connection: Connection) -> Control:
    """The control row. Raises NotFound before `init`."""
    found = _READ.rows(connection)
    if not found:
        raise not_set_up()
    return Control(*found[0])


def rewrite_control(connection: Connection) -> None:
    """Write the row as it is: changes nothing, and fails where nothing can be written."""
    for step in (1, -1):  # a row that becomes what it is SQLite does not write at all
        connection.execute(sa.update(control).values(hot_until=control.c.hot_until + step))


def not_set_up() -> NotFound:
    """What is wrong where there is no control row."""
    return NotFound("the database is not set up; run `starter.py init`")


def hold_lease(connection: Connection, until: int) -> None:
    """The relay drains until then (UTC ms) unless it says so again; never shortens a twin's lease."""
    connection.execute(sa.update(control).where(control.c.hot_until < until).values(hot_until=until))


def clear_lease(connection: Connection) -> None:
    """The relay goes to rest: from here on intake wakes it.

    The exclusive lock waits for every intake that read the lease as held, so that the look that follows in this
    transaction sees what they wrote: none of them is left unseen and unannounced.
    """
    lock_intake(connection, exclusive=True)
    connection.execute(sa.update(control).values(hot_until=0))


def pause_intake(connection: Connection, paused_by: str) -> int:
    """Take no new orders from here on; the new epoch.

    The exclusive lock waits for intakes in flight, so that none slips past what is read after this transaction.
    While a rebuild runs intake is paused already, and stays paused in its name: it counts on that.
    """
    lock_intake(connection, exclusive=True)
    state = read_control(connection)
    if state.intake == PAUSED and state.paused_by == _running(connection):
        return state.epoch
    epoch: int = connection.execute(
        sa.update(control)
        .values(intake=PAUSED, paused_by=paused_by, epoch=control.c.epoch + 1)
        .returning(control.c.epoch)
    ).scalar_one()
    return epoch


def pause_by_hand(connection: Connection, paused_by: str) -> bool:
    """Take no new orders from here on; whether they were taken until now. One that is paused stays in the name of
    whoever paused it: a rebuild counts on its own pause."""
    lock_intake(connection, exclusive=True)
    if read_control(connection).intake == PAUSED:
        return False
    pause_intake(connection, paused_by)
    return True


def resume_intake(connection: Connection) -> bool:
    """Take orders again; whether intake was paused. Raises Refused while a rebuild runs: it counts on the pause."""
    lock_intake(connection, exclusive=True)  # a rebuild that begins at this moment is seen, or sees intake open
    running = _running(connection)
    if running is not None:
        raise Refused(f"{running} runs and needs intake paused; wait for it or cancel it, then resume")
    changed = connection.execute(
        sa.update(control)
        .where(control.c.intake == PAUSED)
        .values(intake=OPEN, paused_by=None, epoch=control.c.epoch + 1)
    ).rowcount
    return changed > 0


def _running(connection: Connection) -> str | None:
    rebuild_id: str | None = connection.execute(
        sa.select(rebuilds.c.rebuild_id).where(sa.text("rebuilds.state = 'RUNNING'"))
    ).scalar_one_or_none()
    return rebuild_id

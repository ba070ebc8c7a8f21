"""Drill switches: a receiver that fails on purpose, until it is switched off."""

import sqlalchemy as sa
from sqlalchemy import Connection

from store.dialect import insert
from store.schema import faults

ERROR, OUTAGE = "error", "outage"


def set_fault(connection: Connection, receiver: str, mode: str) -> None:
    """From here on the receiver raises for every event (`error`) or is unavailable (`outage`)."""
    statement = insert(connection, faults).values(receiver=receiver, mode=mode)
    connection.execute(statement.on_conflict_do_update(index_elements=["receiver"], set_={"mode": mode}))


def clear_fault(connection: Connection, receiver: str) -> bool:
    """The receiver works again; whether it was switched."""
    return connection.execute(sa.delete(faults).where(faults.c.receiver == receiver)).rowcount > 0


_MODE = sa.select(faults.c.mode).where(faults.c.receiver == sa.bindparam("receiver"))


def fault_mode(connection: Connection, receiver: str) -> str | None:
    """`error`, `outage` or None."""
    return connection.execute(_MODE, {"receiver": receiver}).scalar_one_or_none()


def list_faults(connection: Connection) -> dict[str, str]:
    """receiver -> mode of all that are switched."""
    return {row[0]: row[1] for row in connection.execute(sa.select(faults.c.receiver, faults.c.mode))}

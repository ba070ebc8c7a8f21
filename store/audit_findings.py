"""What an audit finds, and the sets that it compares: fingerprints of positions, and the statements behind them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from store.deliveries import DEAD, PENDING, RETRYING, WAIVED
from store.schema import deliveries, ended_subscriptions, outbox, sales_applied, subscriptions

_FOR_EVER = 2**63 - 1
NAMED = 20  # ids named of each break
SALES = "sales"
_NEW = " AND outbox.fanned_out_at IS NULL"
# What waits for the fan-out, found by the two partial indexes on what is unfinished.
NOT_FANNED_OUT = ("outbox.status = 'PENDING'" + _NEW, "outbox.status = 'PUBLISHED'" + _NEW)
# Literals, as the partial indexes have them.
UNFINISHED = {
    PENDING: "deliveries.status = 'pending'",
    RETRYING: "deliveries.status = 'retrying'",
    DEAD: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'dead'",
    WAIVED: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'waived'",
}


class Period(NamedTuple):
    """Events of a type that a receiver takes: those after position `since`, up to `until` where it was ended."""

    event_type: str
    since: int
    until: int

    @property
    def is_everything(self) -> bool:
        """Whether it leaves out no event of the type."""
        return self.since == 0 and self.until == _FOR_EVER


@dataclass(frozen=True)
class Break:
    """One way in which an invariant does not hold: a sentence, how many, and the first ids."""

    invariant: str
    what: str
    count: int
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReceiverCounts:
    """Where the events that a receiver takes stand: `events` = `not_fanned_out` + the sum of `states`."""

    receiver: str
    events: int
    not_fanned_out: int
    states: dict[str, int]


@dataclass
class Audit:
    """What was counted, and what does not hold. `sales`: currency -> (orders, amount) of the generation's rows."""

    orders: int = 0
    events: int = 0
    jobs: int = 0
    charges: int = 0
    shipments: int = 0
    generation: str = ""
    sales: dict[str, tuple[int, int]] = field(default_factory=dict)
    receivers: list[ReceiverCounts] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def break_if(self, connection: Connection, invariant: str, what: str, names: sa.Select[Any]) -> None:
        """Note a break when `names`, one column, has rows. They are counted only then."""
        # Sorted, so that two audits of the same database name the same ones; by length first, as numbers are.
        rows = names.subquery()
        (name,) = rows.c
        found = list(connection.execute(sa.select(name).order_by(sa.func.length(name), name).limit(NAMED)).scalars())
        if not found:
            return
        count = len(found)
        if count == NAMED:
            count = connection.execute(sa.select(sa.func.count()).select_from(rows)).scalar_one()
        self.breaks.append(Break(invariant, what, count, tuple(found)))

    @property
    def clean(self) -> bool:
        """Whether every invariant holds."""
        return not self.breaks


@dataclass(frozen=True)
class Fingerprint:
    """Of a set of positions. Sets without common members add up."""

    count: int = 0
    total: int = 0
    mixed: int = 0

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint(self.count + other.count, self.total + other.total, self.mixed + other.mixed)

    def __sub__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint(self.count - other.count, self.total - other.total, self.mixed - other.mixed)


def fingerprint(position: sa.ColumnElement[int], where: sa.ColumnElement[bool] | None = None) -> list[Any]:
    """The columns of a fingerprint. The factors keep the sum within 64 bits for 8,000 million rows."""
    mixed = (position % sa.literal_column("32749")) * (position % sa.literal_column("32771"))
    pick: Callable[[Any], Any] = (lambda value: value) if where is None else (lambda value: sa.case((where, value)))
    return [sa.func.count(pick(position)), sa.func.sum(pick(position)), sa.func.sum(pick(mixed))]


def weighed(amount: Any, position: sa.ColumnElement[int]) -> Any:
    """A sum that also changes when two amounts change places, and stays within 64 bits likewise."""
    return sa.func.sum((amount % sa.literal_column("65521")) * (position % sa.literal_column("32749")))


def read_fingerprint(row: Iterable[Any]) -> Fingerprint:
    """The fingerprint in a row of its three columns."""
    count, total, mixed = row
    return Fingerprint(count, int(total or 0), int(mixed or 0))


def periods(connection: Connection) -> dict[str, list[Period]]:
    """Receiver -> what it takes and, where it was ended, what it took."""
    taken: dict[str, list[Period]] = {}
    for table, until in (
        (subscriptions, sa.literal_column(str(_FOR_EVER))),
        (ended_subscriptions, ended_subscriptions.c.until_position),
    ):
        for receiver, *period in connection.execute(
            sa.select(table.c.receiver, table.c.event_type, table.c.since_position, until)
        ):
            taken.setdefault(receiver, []).append(Period(*period))
    return taken


def subscribed(taken: Iterable[Period]) -> sa.ColumnElement[bool]:
    """Events of these types, each after its first position and up to its last."""
    # `+ 0`: SQLite would take `position > 0` for a reason to read the whole table, instead of the partial index.
    position = outbox.c.position + 0
    return sa.or_(
        sa.false(),
        *(
            sa.and_(
                outbox.c.event_type == period.event_type,
                position > period.since,
                *([position <= period.until] if period.until < _FOR_EVER else []),
            )
            for period in taken
        ),
    )


def at_sales() -> sa.ColumnElement[bool]:
    """Deliveries to `sales`."""
    # Not by the primary key, which begins with the receiver: the partial index on what is unfinished is the short way.
    return deliveries.c.receiver + "" == SALES


def delivery_of(receiver: str, position: sa.ColumnElement[int] = outbox.c.position, state: str = "") -> sa.Exists:
    """Whether the receiver has a delivery (in that state) of the event at `position`."""
    of = deliveries.alias()
    conditions = [of.c.receiver == receiver, of.c.position == position]
    return sa.exists().select_from(of).where(*conditions, *([of.c.status == state] if state else []))


def held(generation: str, position: sa.ColumnElement[int]) -> sa.Exists:
    """Whether the generation holds the event at `position`."""
    row = sales_applied.alias()
    return sa.exists().select_from(row).where(row.c.generation == generation, row.c.position == position)


def name_of(position: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    """The event id at a position, or the position where there is no event."""
    event = outbox.alias()
    found = sa.select(event.c.event_id).where(event.c.position == position).scalar_subquery()
    return sa.func.coalesce(found, "position " + sa.cast(position, sa.Text))

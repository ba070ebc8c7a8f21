"""What an audit finds, and the sets that it compares: fingerprints of positions, and the statements behind them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.identifiers import order_placed_id
from store.deliveries import DEAD, PENDING, RETRYING, WAIVED
from store.dialect import by_index, json_integer, json_text
from store.schema import deliveries, ended_subscriptions, outbox, sales_totals, subscriptions

_FOR_EVER = 2**63 - 1
NAMED = 20  # ids named of each break
_MOST_CURRENCIES = 20  # added up in one scan
SALES = "sales"
_NEW = " AND outbox.fanned_out_at IS NULL"
# What waits for the fan-out, and the partial index by which it is found.
NOT_FANNED_OUT = {
    "outbox.status = 'PENDING'" + _NEW: "outbox_pending",
    "outbox.status = 'PUBLISHED'" + _NEW: "outbox_in_flight",
}
# Literals, as the partial indexes have them.
UNFINISHED = {
    PENDING: "deliveries.status = 'pending'",
    RETRYING: "deliveries.status = 'retrying'",
    DEAD: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'dead'",
    WAIVED: "deliveries.status IN ('dead', 'waived') AND deliveries.status = 'waived'",
}


def _subscriptions() -> sa.Subquery:
    of, ended = subscriptions.c, ended_subscriptions.c
    for_ever: sa.Label[Any] = sa.literal_column(str(_FOR_EVER)).label("until_position")
    return sa.union_all(
        sa.select(of.receiver, of.event_type, of.since_position, for_ever),
        sa.select(ended.receiver, ended.event_type, ended.since_position, ended.until_position),
    ).subquery("taken")


# What each receiver takes and, where it was ended, what it took: the events of a type after `since_position`, up to
# `until_position`.
taken = _subscriptions()


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


class Check:
    """Names that there must be none of: those that break `invariant` in the way that `what` says."""

    def __init__(self, invariant: str, what: str, names: sa.Select[Any]) -> None:
        """`names` has one column."""
        self.invariant = invariant
        self.what = what
        rows = names.subquery()
        (name,) = rows.c
        # Sorted, so that two audits of the same database name the same ones; by length first, as numbers are.
        self.first = sa.select(name).order_by(sa.func.length(name), name).limit(NAMED)
        self.count = sa.select(sa.func.count()).select_from(rows)


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

    def look_for(self, connection: Connection, *checks: "Check") -> None:
        """Note a break for each check whose names have rows. They are counted only then."""
        for check in checks:
            names = tuple(connection.execute(check.first).scalars())
            if names:
                count = len(names)
                if count == NAMED:
                    count = connection.execute(check.count).scalar_one()
                self.breaks.append(Break(check.invariant, check.what, count, names))

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


def at_receiver(receiver: str) -> sa.ColumnElement[bool]:
    """Deliveries to it."""
    # Not by the primary key, which begins with the receiver: the partial index on what is unfinished is the short way.
    return deliveries.c.receiver + "" == receiver


def delivery_of(
    receiver: str | sa.ColumnElement[str], position: sa.ColumnElement[int] = outbox.c.position, state: str = ""
) -> sa.Exists:
    """Whether the receiver has a delivery (in that state) of the event at `position`."""
    of = deliveries.alias()
    conditions = [of.c.receiver == receiver, of.c.position == position]
    return sa.exists().select_from(of).where(*conditions, *([of.c.status == state] if state else []))


def without_delivery(*columns: Any) -> list[sa.Select[Any]]:
    """`columns` of the events that wait for the fan-out, joined with `taken`, and have no delivery there yet."""
    return [
        by_index(
            sa.select(*columns)
            .join_from(outbox, taken, taken.c.event_type == outbox.c.event_type)
            .where(
                sa.text(condition),
                outbox.c.position > taken.c.since_position,
                outbox.c.position <= taken.c.until_position,
                ~delivery_of(taken.c.receiver),
            ),
            outbox,
            index,
        )
        for condition, index in NOT_FANNED_OUT.items()
    ]


def event_at(position: sa.ColumnElement[int], event_type: str = "") -> sa.Exists:
    """Whether there is an event (of that type) at `position`."""
    of = outbox.alias()
    return (
        sa.exists()
        .select_from(of)
        .where(of.c.position == position, *([of.c.event_type == event_type] if event_type else []))
    )


@dataclass(frozen=True)
class Sums:
    """Orders and amounts of one currency; `weight` also changes when two amounts change places."""

    orders: int = 0
    amount: int = 0
    weight: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.orders + other.orders, self.amount + other.amount, self.weight + other.weight)


ByCurrency = dict[str, Sums]


def add_sums(into: ByCurrency, rows: Iterable[Any]) -> None:
    """Add rows of (currency, orders, amount, weight)."""
    for currency, *numbers in rows:
        into[currency] = into.get(currency, Sums()) + Sums(*(int(number) for number in numbers))


def read_sums(
    connection: Connection,
    rows: Callable[..., sa.Select[Any]],
    currency: Any,
    amount: Any,
    position: sa.ColumnElement[int],
    *others: Any,
) -> tuple[ByCurrency, Sequence[Any]]:
    """(Sums of the rows, values of the aggregates `others` over all of them). `rows` selects the columns that it is
    given from these rows."""
    # A GROUP BY sorts every row on SQLite. One scan adds up the currencies that have totals; if those are not all,
    # their counts do not come to the whole.
    known = list(
        connection.execute(
            sa.select(sales_totals.c.currency).distinct().order_by(sales_totals.c.currency).limit(_MOST_CURRENCIES)
        ).scalars()
    )
    columns: list[Any] = []
    for code in known:
        of = sa.case((currency == code, amount))
        columns += [sa.func.count(of), sa.func.sum(of), weighed(of, position)]
    whole, *numbers = connection.execute(rows(sa.func.count(), *columns, *others)).one()
    sums: ByCurrency = {}
    parts = [(code, *numbers[3 * place : 3 * place + 3]) for place, code in enumerate(known)]
    add_sums(sums, (part for part in parts if part[1]))
    if whole != sum(entry.orders for entry in sums.values()):
        sums.clear()
        grouped = rows(currency, sa.func.count(), sa.func.sum(amount), weighed(amount, position))
        add_sums(sums, connection.execute(grouped.group_by(currency)))
    return sums, numbers[len(columns) :]


def same_sums(whole: ByCurrency, *parts: ByCurrency) -> bool:
    """Whether the parts come to the whole, in each currency."""
    return all(
        sum((part.get(code, Sums()) for part in parts), Sums()) == whole.get(code, Sums())
        for code in whole.keys() | {code for part in parts for code in part}
    )


def not_taken(connection: Connection, receiver: str, after: int = 0) -> ByCurrency:
    """Sums of the `order-placed` events at positions above `after` that the receiver has not done: unfinished, on
    their way, or not for it."""
    paid_in = json_text(connection, outbox.c.payload, "currency").label("paid_in")
    amount = json_integer(connection, outbox.c.payload, "amount")
    placed = (
        sa.select(paid_in, sa.func.count(), sa.func.sum(amount), weighed(amount, outbox.c.position))
        .where(outbox.c.event_type == ORDER_PLACED, outbox.c.position + 0 > after)
        .group_by(sa.text("paid_in"))
    )
    found: ByCurrency = {}
    of_deliveries = placed.join_from(deliveries, outbox, outbox.c.position == deliveries.c.position)
    for condition in UNFINISHED.values():
        add_sums(found, connection.execute(of_deliveries.where(at_receiver(receiver), sa.text(condition))))
    outside = never_for(connection, receiver)
    without = placed.where(~delivery_of(receiver))
    for condition in NOT_FANNED_OUT:
        on_its_way = without.where(sa.text(condition))
        add_sums(found, connection.execute(on_its_way if outside is None else on_its_way.where(~outside)))
    if outside is not None:
        add_sums(found, connection.execute(without.where(outside)))
    return found


def periods(connection: Connection) -> dict[str, list[Period]]:
    """Receiver -> what it takes and took."""
    found: dict[str, list[Period]] = {}
    for receiver, *period in connection.execute(sa.select(*taken.c)):
        found.setdefault(receiver, []).append(Period(*period))
    return found


def within(period: Period) -> sa.ColumnElement[bool]:
    """Events of the period."""
    # `+ 0`: SQLite would take `position > 0` for a reason to read the whole table, instead of the partial index.
    position = outbox.c.position + 0
    return sa.and_(
        outbox.c.event_type == period.event_type,
        position > period.since,
        *([position <= period.until] if period.until < _FOR_EVER else []),
    )


def never_for(connection: Connection, receiver: str) -> sa.ColumnElement[bool] | None:
    """`order-placed` events that are not for the receiver: from before it was registered or after it was ended. None
    when it takes all of them."""
    found = [period for period in periods(connection).get(receiver, []) if period.event_type == ORDER_PLACED]
    if any(period.is_everything for period in found):
        return None
    return sa.and_(outbox.c.event_type == ORDER_PLACED, ~sa.or_(sa.false(), *(within(period) for period in found)))


def other_amounts(connection: Connection, table: sa.Table) -> sa.Select[Any]:
    """Event ids of the rows of `table` that have another amount or currency than their `order-placed` event."""
    return (
        sa.select(outbox.c.event_id)
        .join_from(table, outbox, outbox.c.position == table.c.position)
        .where(
            outbox.c.event_type == ORDER_PLACED,
            sa.or_(
                table.c.amount != json_integer(connection, outbox.c.payload, "amount"),
                table.c.currency != json_text(connection, outbox.c.payload, "currency"),
            ),
        )
    )


def other_orders(table: sa.Table) -> sa.Select[Any]:
    """Event ids of the rows of `table` that name another order than their `order-placed` event is of."""
    return (
        sa.select(outbox.c.event_id)
        .join_from(table, outbox, outbox.c.position == table.c.position)
        .where(outbox.c.event_type == ORDER_PLACED, outbox.c.event_id != table.c.order_id + order_placed_id(""))
    )


def business_key(suffix: str) -> Any:
    """The event id without its suffix; no text at all where it is shorter."""
    length = sa.func.length(outbox.c.event_id) - len(suffix)
    # PostgreSQL refuses to cut at a negative length.
    return sa.case((length > 0, sa.func.substr(outbox.c.event_id, 1, length)), else_="")


def name_of(position: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    """The event id at a position, or the position where there is no event."""
    event = outbox.alias()
    found = sa.select(event.c.event_id).where(event.c.position == position).scalar_subquery()
    return sa.func.coalesce(found, "position " + sa.cast(position, sa.Text))

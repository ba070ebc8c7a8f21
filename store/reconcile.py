"""Reconciliation: is a generation exactly the expected set, id by id and amount by amount?

Both sides are walked side by side in binary order of the event ids, in ranges: the database writes each side of a range
as text, one line an event (`id amount currency`). Equal texts mean equal ids and equal amounts; where they differ, the
lines tell which. The running digest of the texts is the one in the certificate. Memory stays flat however long the
history is.

A range is one read. That is enough: nobody writes to the expected set after it is fixed, and to a generation only the
replay before, nobody after it is sealed.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.counts import counted
from store.dialect import join_lines
from store.schema import outbox, rebuild_expected, sales_applied, sales_totals

_NAMED = 20  # differences named of each kind
_MOST_CURRENCIES = 20  # added up in one scan


@dataclass(frozen=True)
class Range:
    """Both sides of one range, and the last expected event id in it (None: the range beyond the expected set)."""

    last: str | None
    expected: str
    applied: str


def read_range(connection: Connection, rebuild_id: str, generation: str, after: str, limit: int) -> Range:
    """The next `limit` expected events above `after`, and the generation's events of the same range."""
    chunk = (
        sa.select(rebuild_expected.c.event_id, rebuild_expected.c.amount, rebuild_expected.c.currency)
        .where(rebuild_expected.c.rebuild_id == rebuild_id, rebuild_expected.c.event_id > after)
        .order_by(rebuild_expected.c.event_id)
        .limit(limit)
        .subquery()
    )
    expected = connection.execute(
        sa.select(join_lines(connection, chunk.c.event_id + " " + _what(chunk.c)))
    ).scalar_one()
    # The last line has the last id: the database would compare all of them once more.
    last = None if expected is None else expected[expected.rfind("\n") + 1 :].rsplit(" ", 2)[0]
    within = [outbox.c.event_id > after]
    if last is not None:
        within.append(outbox.c.event_id <= last)
    # A scalar subquery, not a join: a planner that begins with the generation would read all of it for every range.
    held = (
        sa.select(_what(sales_applied.c))
        .where(sales_applied.c.generation == generation, sales_applied.c.position == outbox.c.position)
        .scalar_subquery()
    )
    side = sa.select(outbox.c.event_id, held.label("what")).where(*within).order_by(outbox.c.event_id)
    if last is None:
        # Beyond the expected set: all of these are unexpected, and it is enough to name some, however narrow the range.
        side = side.where(held.is_not(None)).limit(max(limit, _NAMED + 1))
    rows = side.subquery()
    # Events that the generation does not hold give NULL, which the aggregate leaves out.
    applied = connection.execute(sa.select(join_lines(connection, rows.c.event_id + " " + rows.c.what))).scalar_one()
    return Range(last, _ended(expected), _ended(applied))


def _ended(lines: str | None) -> str:
    return f"{lines}\n" if lines else ""


def _what(columns: Any) -> Any:
    return sa.cast(columns.amount, sa.Text) + " " + columns.currency


@dataclass
class Reconciliation:
    """The comparison so far. `sums`: currency -> (orders, amount) of the generation's rows."""

    count: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    totals_off: list[str] = field(default_factory=list)
    _digest: Any = field(default_factory=sha256)

    def add(self, part: Range) -> None:
        """Compare one range."""
        self._digest.update(part.applied.encode())
        if part.expected == part.applied:
            self.count += part.applied.count("\n")
            return
        expected, applied = _parse(part.expected), _parse(part.applied)
        self.count += len(applied)
        _name(self.missing, (event_id for event_id in expected if event_id not in applied))
        _name(self.unexpected, (event_id for event_id in applied if event_id not in expected))
        _name(
            self.different,
            (
                f"{event_id} (expected {expected[event_id]}, found {value})"
                for event_id, value in applied.items()
                if event_id in expected and expected[event_id] != value
            ),
        )

    @property
    def digest(self) -> str:
        """SHA-256 over the lines of the generation in binary order of the ids, in hexadecimal."""
        return str(self._digest.hexdigest())

    def problems(self) -> list[str]:
        """Named differences, one sentence a kind; empty when the two sides are equal."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("different", self.different),
            ("totals", self.totals_off),
        )
        return [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]


def _parse(text: str) -> dict[str, str]:
    # From the right: an event id may hold spaces, an amount and a currency cannot.
    lines = (line.rsplit(" ", 2) for line in text.split("\n")[:-1])
    return {line[0]: f"{line[1]} {line[2]}" for line in lines}


def _name(into: list[str], names: Iterable[str]) -> None:
    for name in names:
        if len(into) >= _NAMED:
            if into[-1] != "...":
                into.append("...")
            return
        into.append(name)


def check_sums(connection: Connection, rebuild_id: str, generation: str, found: Reconciliation) -> dict[str, list[int]]:
    """Counts and sums by currency of the expected set, the generation's rows and its totals; differences go to
    `found.totals_off`, and rows of no event, which no range has, to `found.unexpected`. Call it after the last range.
    Returns currency -> [orders, amount] of the expected set."""
    totals = {
        row[0]: [row[1], row[2]]
        for row in connection.execute(
            sa.select(sales_totals.c.currency, sales_totals.c.orders, sales_totals.c.amount).where(
                sales_totals.c.generation == generation
            )
        )
    }
    known = sorted(totals)
    expected = _sums(connection, rebuild_expected, rebuild_expected.c.rebuild_id == rebuild_id, known)
    applied = _sums(connection, sales_applied, sales_applied.c.generation == generation, known)
    for currency in sorted(expected.keys() | applied.keys() | totals.keys()):
        sides = [side.get(currency, [0, 0]) for side in (expected, applied, totals)]
        if not sides[0] == sides[1] == sides[2]:
            found.totals_off.append(
                f"{currency} expected {counted(sides[0][0], 'order')}, {sides[0][1]}; "
                f"rows hold {sides[1][0]}, {sides[1][1]}; totals say {sides[2][0]}, {sides[2][1]}"
            )
    if sum(count for count, _ in applied.values()) != found.count:
        # The ranges go by the events, so a row at a position where there is none is in no range.
        _name(found.unexpected, _rows_of_no_event(connection, generation))
    return expected


def _rows_of_no_event(connection: Connection, generation: str) -> list[str]:
    position = sales_applied.c.position
    event = sa.exists().select_from(outbox).where(outbox.c.position == position)
    found = connection.execute(
        sa.select(position).where(sales_applied.c.generation == generation, ~event).order_by(position).limit(_NAMED + 1)
    )
    return [f"position {each}, where there is no event" for each in found.scalars()]


def _sums(
    connection: Connection, table: sa.Table, condition: sa.ColumnElement[bool], known: list[str]
) -> dict[str, list[int]]:
    """Currency -> [orders, amount] of the rows. `known`: the currencies that are likely."""
    if len(known) <= _MOST_CURRENCIES:
        # A GROUP BY sorts every row on SQLite, in as much memory again as the page cache takes. One scan adds up the
        # currencies that are known; if they are not all, their counts do not come to the whole.
        columns: list[Any] = [sa.func.count()]
        for currency in known:
            amount = sa.case((table.c.currency == currency, table.c.amount))
            columns += [sa.func.count(amount), sa.func.sum(amount)]
        whole, *numbers = connection.execute(sa.select(*columns).select_from(table).where(condition)).one()
        if whole == sum(numbers[::2]):
            pairs = zip(known, numbers[::2], numbers[1::2], strict=True)
            return {currency: [count, int(amount)] for currency, count, amount in pairs if count}
    rows = connection.execute(
        sa.select(table.c.currency, sa.func.count(), sa.func.sum(table.c.amount))
        .where(condition)
        .group_by(table.c.currency)
    )
    return {row[0]: [row[1], int(row[2])] for row in rows}


def certificate_text(
    *, rebuild_id: str, generation: str, found: Reconciliation, sums: dict[str, list[int]], now_iso: str
) -> str:
    """The certificate as JSON text. Call it only without problems."""
    return json.dumps(
        {
            "rebuild": rebuild_id,
            "generation": generation,
            "orders": found.count,
            "sums": sums,
            "digest": f"sha256:{found.digest}",
            "verified_at": now_iso,
        },
        sort_keys=True,
    )

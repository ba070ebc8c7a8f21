"""Work is found through an index: none of the hot queries reads a table from end to end."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from store import dialect
from store.deliveries import claim_runs, load_delivery, mark_done, next_batch, record_failure, waits_behind
from store.dialect import open_driver
from store.engine import Database
from store.fanout import fan_out
from store.jobs import begin_job, complete_charge, complete_ship, completed_steps, due_for_look, end_job
from store.orders import place_new_orders, place_order, place_orders
from store.outbox import (
    events_of,
    find_event,
    lost_events,
    mark_published,
    pending_events,
    publish_again,
    reset_to_pending,
)
from store.unfinished import unfinished
from tests.store.scenes import append, delivered_to, order

# Growing tables only. The second is as bad: the primary key of `deliveries` down to the receiver is its whole past.
_WHOLE = re.compile(
    r"SCAN (orders|outbox|deliveries|jobs|job_steps|charges|shipments|earlier)\b"
    r"(?! USING (COVERING )?INDEX \w+_(pending|in_flight|due|running))"
    r"|SEARCH deliveries USING PRIMARY KEY \(receiver=\?\)"
)

CALLS: dict[str, Callable[[sa.Connection, Any], Any]] = {
    "pending_events": lambda c, e: pending_events(c, 10),
    "lost_events": lambda c, e: lost_events(c, before=10, head="a-1", limit=10),
    "lost_events of an empty list": lambda c, e: lost_events(c, before=10, head=None, limit=10),
    "mark_published": lambda c, e: mark_published(c, [1, 2], 5),
    "reset_to_pending": lambda c, e: reset_to_pending(c, [1, 2]),
    "publish_again": lambda c, e: publish_again(c, "a-2"),
    "find_event": lambda c, e: find_event(c, "a-2"),
    "events_of": lambda c, e: events_of(c, "a"),
    "fan_out": lambda c, e: fan_out(c, [b"b-2", b"junk"], 5),
    "next_batch": lambda c, e: next_batch(c, "one", 10),
    "mark_done": lambda c, e: mark_done(c, "one", [2]),
    "record_failure": lambda c, e: record_failure(c, "one", 2, attempts=1, error="x", next_attempt_at=9, now=1),
    "load_delivery": lambda c, e: load_delivery(c, "one", "a-2"),
    "waits_behind": lambda c, e: waits_behind(c, "one", e[2]),
    "claim_runs": lambda c, e: claim_runs(c, "one", 10, now=9, overdue=5),
    "unfinished": lambda c, e: unfinished(c, ["one", "two"]),
    "due_for_look": lambda c, e: due_for_look(c, 5, 10),
    "place_order": lambda c, e: place_order(c, order(5), 5),
    "place_orders": lambda c, e: place_orders(c, [order(5), order(6)], 5),
    "place_new_orders": lambda c, e: place_new_orders(c, [order(5), order(6)], 5),
    "a job": lambda c, e: (
        begin_job(c, "j", 7, 1, 2),
        completed_steps(c, "j"),
        complete_charge(c, "j", 7, 3),
        complete_ship(c, "j", 4),
        end_job(c, "j", None),
    ),
}


class _Noted:
    """The driver's connection; what it is given is noted as it is, with its parameters still apart."""

    def __init__(self, driver: Any, statements: list[tuple[str, Any]]) -> None:
        self._driver = driver
        self._statements = statements

    def execute(self, text: str, parameters: Any) -> Any:
        self._statements.append((text, parameters))
        return self._driver.execute(text, parameters)

    def executemany(self, text: str, rows: Any) -> Any:
        self._statements.append((text, rows[0]))
        return self._driver.executemany(text, rows)


@pytest.mark.parametrize("name", CALLS)
def test_a_hot_query_reads_no_table_from_end_to_end(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    events = delivered_to(sqlite, "one", "two", count=5)
    append(sqlite, "b", 1, 2)
    with sqlite.write() as connection:
        record_failure(connection, "one", events[0].position, attempts=1, error="x", next_attempt_at=9, now=1)
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        statements.append((statement, parameters[0] if many else parameters))

    # The hottest ones go to the driver directly, where SQLAlchemy's event does not see them.
    monkeypatch.setattr(dialect, "open_driver", lambda c: _Noted(open_driver(c), statements))
    sa.event.listen(sqlite.engine, "before_cursor_execute", note)
    with sqlite.write() as connection:
        CALLS[name](connection, events)
        sa.event.remove(sqlite.engine, "before_cursor_execute", note)
        plans = [
            (statement, detail)
            for statement, parameters in statements
            for *_, detail in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    assert statements
    assert [(detail, statement) for statement, detail in plans if _WHOLE.search(detail)] == []

"""How long a second process waits to write while the pipeline drains at full speed, on SQLite.

The floor is the same process with nobody beside it.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from bench.report import Row, percentile, row
from bench.stack import Scratch, beside, order_ids, record, scratch, wait_for

COUNT = 50_000
FEWER = 20_000
_RATE = 100.0  # orders a second of the second process
_AT_REST = 5.0  # seconds
_GOAL_MS = 100.0


def run(count: int) -> list[Row]:
    """`count` recorded orders are drained meanwhile."""
    with scratch() as stack:
        with _writing(stack, "rest") as rest:
            time.sleep(_AT_REST)
        record(stack.database, order_ids(count))
        started = time.monotonic()
        with stack.worker(), _writing(stack, "drain") as drain:
            wait_for(lambda: _recorded_are_done(stack, count), 0.05)
            took = time.monotonic() - started
    rows = []
    for kind, words in (("wait", "wait for the write lock"), ("whole", "whole transaction")):
        beside, alone = sorted(drain[kind]), sorted(rest[kind])
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            goal = _GOAL_MS if (kind, name) == ("wait", "p99") else None
            rows.append(
                row(f"{words}, {name}", percentile(beside, share), "ms", floor=percentile(alone, share), most=goal)
            )
    rows.append(row("transactions beside the drain", len(drain["wait"]), "", floor=len(rest["wait"])))
    rows.append(row("drain, from the worker's start", took, "s"))
    return rows


def _recorded_are_done(stack: Scratch, count: int) -> bool:
    # By position: what the second process places meanwhile comes after these.
    with stack.database.read() as connection:
        for table in ("billing_entries", "mail_messages", "sales_applied"):
            if (connection.exec_driver_sql(f"SELECT max(position) FROM {table}").scalar() or 0) < count:
                return False
        return True


@contextlib.contextmanager
def _writing(stack: Scratch, prefix: str) -> Iterator[dict[str, Any]]:
    """The second process for the block; what it measured is in the dictionary afterwards."""
    result: dict[str, Any] = {}
    with beside("bench.writer", stack.database.url.render_as_string(), prefix, str(_RATE)) as printed:
        yield result
    result.update(printed[0])

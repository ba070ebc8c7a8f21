"""The drain with a million old orders in the database, beside the same drain on an empty one.

Both have their own worker; the runs are interleaved. The old orders are delivered, as they would be.
"""

from functools import partial

from bench.drain import release
from bench.history import ORDERED, fill
from bench.report import Row, median, row
from bench.stack import order_ids, record, require_clean, scratch

COUNT = 20_000
FEWER = 10_000
_OLD = 50  # old orders for each new one
_RUNS = 3  # each lasts a second or less


def run(count: int) -> list[Row]:
    """`count` orders a run, beside fifty times as many old ones."""
    old = count * _OLD
    with scratch() as stack, stack.another_database() as empty, stack.another_database() as full:
        fill(full, old, ORDERED)
        seconds: dict[str, list[float]] = {"full": [], "empty": []}
        for number in range(_RUNS):
            ids = order_ids(count, prefix=f"run-{number}")
            for which, database in (("empty", empty), ("full", full)):
                with stack.worker(database=database):
                    seconds[which].append(release(stack, database, partial(record, database, ids)))
        require_clean(full, old + _RUNS * count)
    rate = {which: count / median(each) for which, each in seconds.items()}
    return [row(f"drain with {old:,} old orders", rate["full"], "events/s", floor=rate["empty"], least=0.9, by="ratio")]

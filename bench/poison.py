"""One order in a hundred is poison for one receiver; and the backlog of a dead receiver when it returns.

The floor is the same worker with the same orders, none of them poison. A receiver's time is until it has taken
all that is not poison; "full rate" is four fifths of what it takes on average from its return to the end.
"""

import time
from functools import partial
from itertools import pairwise

from bench.drain import at_rest, release_each
from bench.poisoned import POISON
from bench.report import Row, median, row
from bench.stack import RECEIVER_NAMES, Scratch, is_done, order_ids, record, require_clean, scratch, wait_for
from contracts.errors import SaiseiError
from store.audit import audit
from store.clock import now_ms
from store.engine import Database
from store.faults import OUTAGE, clear_fault, set_fault
from store.receivers import get_hold

COUNT = 20_000
FEWER = 10_000
_EVERY = 100  # one in so many is poison
_BACKLOG = 5  # so many times as many orders wait for the dead receiver
_SICK = "sales"
_PROGRAM = ("-m", "bench.poisoned")
_RUNS = 3
_WINDOW = 0.25  # seconds
_FULL = 0.8
_HELD = 3.0  # seconds: by then the waits between two probes are at their longest


def run(count: int) -> list[Row]:
    """`count` orders, and five times as many for the receiver that was dead."""
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(_RUNS):
        for poisoned in (False, True):
            # Servers of its own: the runs of failing events would go on beside the next one.
            with scratch() as stack:
                for name, taken in _drain(stack, count, poisoned=poisoned).items():
                    seconds.setdefault((name, poisoned), []).append(taken)
    with scratch() as stack:
        back = _return(stack, count * _BACKLOG)
    rows = []
    for name in RECEIVER_NAMES:
        clean, beside = (count / median(seconds[name, poisoned]) for poisoned in (False, True))
        what, least = (f"{name}, poisoned", 0.3) if name == _SICK else (f"{name}, beside it", 0.9)
        rows.append(row(what, beside, "events/s", floor=clean, least=least, by="ratio"))
    return [*rows, row(f"{_SICK} returns to {count * _BACKLOG:,}: full rate after", back, "s", most=2)]


def _drain(stack: Scratch, count: int, *, poisoned: bool) -> dict[str, float]:
    def sku(number: int) -> str:
        return POISON if poisoned and number % _EVERY == 0 else "tea"

    with stack.another_database() as database, stack.worker(_PROGRAM, database):
        done = release_each(stack, database, partial(record, database, order_ids(count), sku=sku))
        with database.read() as connection:
            found = audit(connection)
    for counts in found.receivers:
        bad = len(range(0, count, _EVERY)) if poisoned and counts.receiver == _SICK else 0
        if not found.clean or counts.states["done"] != count - bad:
            raise SaiseiError(f"{counts.receiver} has {counts.states} of {count} events; {found.breaks}")
    return done


def _return(stack: Scratch, count: int) -> float:
    """The seconds from the receiver's return until it works at its full rate."""
    with stack.another_database() as database, stack.worker(database=database):
        wait_for(lambda: at_rest(database), 0.02)
        with database.write() as connection:
            set_fault(connection, _SICK, OUTAGE)
        record(database, order_ids(count))
        wait_for(lambda: _only_the_sick_waits(database), 0.05)
        wait_for(lambda: _held_for(database) >= _HELD, 0.05)
        with database.write() as connection:
            clear_fault(connection, _SICK)
        begun = time.monotonic()
        progress = [(0.0, 0)]

        def look() -> bool:
            with database.read() as connection:
                taken = connection.exec_driver_sql("SELECT coalesce(max(position), 0) FROM sales_applied").scalar_one()
            progress.append((time.monotonic() - begun, taken))
            return bool(taken >= count)

        wait_for(look, _WINDOW)
        require_clean(database, count)
    first = next(when for when, taken in progress if taken)
    average = count / max(progress[-1][0] - first, _WINDOW)
    for (before, had), (when, has) in pairwise(progress):
        if (has - had) / (when - before) >= _FULL * average:
            return when
    return progress[-1][0]


def _held_for(database: Database) -> float:
    """Seconds for which the receiver has been on hold."""
    with database.read() as connection:
        hold = get_hold(connection, _SICK)
    return (now_ms() - hold.since) / 1000 if hold is not None else 0.0


def _only_the_sick_waits(database: Database) -> bool:
    with database.read() as connection:
        return get_hold(connection, _SICK) is not None and all(
            is_done(connection, name) for name in RECEIVER_NAMES if name != _SICK
        )

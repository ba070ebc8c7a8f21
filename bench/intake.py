"""Orders taken a second, each durable when it is answered: in process and over HTTP, at rest and beside a drain.

The floor is what the database can do of such transactions at all, one after the other: sqlite3 by hand, an order and
its event each. Beside a drain the floor is the same intake at rest.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from bench.drain import at_rest
from bench.report import Row, percentile, row
from bench.stack import Scratch, beside, order_ids, record, scratch, wait_for
from contracts.errors import SaiseiError
from contracts.events import ORDER_PLACED
from contracts.orders import Order
from intake import Intake
from store.audit import audit
from store.engine import Database

COUNT = 50_000
FEWER = 10_000
CLIENTS = 16
_WINDOW = 3.0  # seconds of each measurement at rest


@dataclass
class _Placed:
    """The milliseconds of each order that was answered, and the seconds in which they were placed."""

    times: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Orders a second."""
        return len(self.times) / self.seconds

    @property
    def p99(self) -> float:
        """Milliseconds."""
        return percentile(sorted(self.times), 0.99)


# Places orders whose ids begin with the prefix, for the block.
Placing = Callable[[str], AbstractContextManager["_Placed"]]
Way = Callable[[Scratch, Database], AbstractContextManager[Placing]]


def run(count: int) -> list[Row]:
    """`count` recorded orders are drained meanwhile, for each of the two ways in."""
    rows = []
    with scratch() as stack:
        with stack.another_database() as database:
            limit = _single_transactions(database)
        ways: tuple[tuple[str, Way], ...] = (("in process", _in_process), (f"HTTP, {CLIENTS} clients", _over_http))
        for name, way in ways:
            with stack.another_database() as database, way(stack, database) as placing:
                rows += _both(stack, database, name, placing, count, limit)
    return rows


def _both(stack: Scratch, database: Database, name: str, placing: Placing, count: int, limit: float) -> list[Row]:
    with placing("rest") as rest:
        time.sleep(_WINDOW)
    with stack.worker(database=database):
        wait_for(lambda: at_rest(database) and _taken(database) == _last(database), 0.05)
        last = _last(database)
        record(database, order_ids(count))
        with placing("drain") as beside:  # its first order wakes the pipeline
            wait_for(lambda: _taken(database) >= last + count, 0.02)
        wait_for(lambda: _taken(database) == _last(database), 0.05)
    if not beside.times:
        raise SaiseiError(f"the drain of {count} orders was over before the first one was placed beside it")
    with database.read() as connection:
        found = audit(connection)
    if not found.clean or found.orders != last + count + len(beside.times):
        raise SaiseiError(f"{found.orders} orders, {last + count + len(beside.times)} answers, {found.breaks}")
    return [
        row(f"{name}, at rest", rest.rate, "orders/s", floor=limit, least=0.5, by="ratio"),
        row(f"{name}, at rest, p99", rest.p99, "ms"),
        row(f"{name}, beside a drain", beside.rate, "orders/s", floor=rest.rate, least=0.5, by="ratio"),
        row(f"{name}, beside a drain, p99", beside.p99, "ms", floor=rest.p99, most=100),
    ]


def _single_transactions(database: Database) -> float:
    """What the database can do of them a second."""
    connection = sqlite3.connect(str(database.url.database), isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")
    payload = '{"amount":100,"currency":"JPY","order_id":"%s","qty":1,"sku":"tea"}'
    started = time.monotonic()
    count = 0
    while time.monotonic() - started < _WINDOW:
        order = f"limit-{count}"
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES (?, 'tea', 1, 100, 'JPY', 1)", (order,))
        connection.execute(
            "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload) VALUES (?, ?, 1, ?, ?)",
            (f"{order}:placed", f"order/{order}", ORDER_PLACED, payload % order),
        )
        connection.execute("COMMIT")
        count += 1
    connection.close()
    return count / _WINDOW


@contextlib.contextmanager
def _in_process(stack: Scratch, database: Database) -> Iterator[Placing]:
    """One thread of this process, through `Intake`."""
    intake = Intake(database, _unheard)

    @contextlib.contextmanager
    def placing(prefix: str) -> Iterator[_Placed]:
        stop = threading.Event()
        placed = _Placed()

        def place() -> None:
            begun = time.monotonic()
            while not stop.is_set():
                started = time.monotonic()
                intake.place(Order(f"{prefix}-{len(placed.times)}", "tea", 1, 100, "JPY"))
                placed.times.append((time.monotonic() - started) * 1000)
            placed.seconds = time.monotonic() - begun

        thread = threading.Thread(target=place)
        thread.start()
        try:
            yield placed
        finally:
            stop.set()
            thread.join()

    yield placing


async def _unheard() -> None:
    """The worker's look finds the first order within two seconds."""


@contextlib.contextmanager
def _over_http(stack: Scratch, database: Database) -> Iterator[Placing]:
    """The API in a process of its own, and the clients in another."""
    with stack.program(("api.py",), "api ready", database, {"SAISEI_API_PORT": "0"}) as (_, line):
        host, port = line.rsplit("//", 1)[1].split(":")

        @contextlib.contextmanager
        def placing(prefix: str) -> Iterator[_Placed]:
            placed = _Placed()
            with beside("bench.client", host, port, str(CLIENTS), prefix) as printed:
                yield placed
            placed.times, placed.seconds = printed[0]

        yield placing


def _last(database: Database) -> int:
    with database.read() as connection:
        return int(connection.exec_driver_sql("SELECT coalesce(max(position), 0) FROM outbox").scalar_one())


def _taken(database: Database) -> int:
    """Up to which position every receiver is done."""
    tables = ("billing_entries", "mail_messages", "sales_applied")
    with database.read() as connection:
        return min(
            int(connection.exec_driver_sql(f"SELECT coalesce(max(position), 0) FROM {table}").scalar_one())
            for table in tables
        )

"""What many store tests begin with: orders placed, events published, fanned out, taken. Times are small numbers."""

import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from contracts.events import Event
from contracts.orders import Order
from store.deliveries import next_batch
from store.engine import Database
from store.fanout import FannedOut, fan_out
from store.orders import place_order
from store.outbox import append_event, mark_published, pending_events
from store.receivers import register_receiver

TYPE = "thing-happened"


def order(number: int = 1, **changes: Any) -> Order:
    return Order(
        **{"id": f"order-{number}", "sku": "sku-1", "qty": 1, "amount": 100 * number, "currency": "JPY"} | changes
    )


def place(database: Database, *numbers: int) -> None:
    with database.write() as connection:
        for number in numbers:
            place_order(connection, order(number), 1)


def append(database: Database, aggregate: str, *numbers: int, event_type: str = TYPE) -> list[Event]:
    """Events `aggregate-n` of `aggregate`, in one transaction."""
    with database.write() as connection:
        return [
            append_event(
                connection,
                event_id=f"{aggregate}-{number}",
                aggregate_id=aggregate,
                event_type=event_type,
                payload={"order_id": f"{aggregate}-{number}", "amount": number, "currency": "JPY"},
            )[0]
            for number in numbers
        ]


def register(database: Database, *names: str, event_type: str = TYPE) -> None:
    with database.write() as connection:
        for name in names:
            register_receiver(connection, name, [event_type])


def publish(database: Database, now: int = 1) -> list[str]:
    """Marks all that is pending as pushed; the event ids, as they would be in the list."""
    with database.write() as connection:
        pending = pending_events(connection, 10_000)
        mark_published(connection, [position for position, _ in pending], now)
        return [event_id for _, event_id in pending]


def spread(database: Database, *event_ids: str, now: int = 2) -> FannedOut:
    with database.write() as connection:
        return fan_out(connection, [event_id.encode() for event_id in event_ids], now)


def delivered_to(database: Database, *names: str, aggregate: str = "a", count: int = 3) -> list[Event]:
    """`count` events of one aggregate, pending at each receiver of that name."""
    register(database, *names)
    events = append(database, aggregate, *range(1, count + 1))
    spread(database, *publish(database))
    return events


def batch(database: Database, receiver: str, limit: int = 100) -> list[str]:
    with database.read() as connection:
        return [event.event_id for event in next_batch(connection, receiver, limit)]


def rows(database: Database, statement: Any) -> list[tuple[Any, ...]]:
    with database.read() as connection:
        return [
            tuple(row) for row in connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
        ]


def scalar(database: Database, statement: Any) -> Any:
    return rows(database, statement)[0][0]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls in threads that start at once; their results, an exception where one was raised."""
    gate = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        gate.wait(60)
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index, call), daemon=True) for index, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    return results


def bump(database: Database) -> None:
    with database.write() as connection:
        n = connection.exec_driver_sql("SELECT n FROM counter").scalar_one()
        connection.exec_driver_sql("UPDATE counter SET n = ?", (n + 1,))


def read_counter(database: Database) -> int:
    return int(scalar(database, "SELECT n FROM counter"))

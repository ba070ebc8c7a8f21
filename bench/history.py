"""A long history that is all delivered, written by a few statements of SQLite instead of by the pipeline."""

import sqlite3
from collections.abc import Sequence

from contracts.events import ORDER_PLACED
from receivers.registry import RECEIVERS
from store.engine import Database
from store.schema import INITIAL

ORDERED, RANDOM = "ordered", "random"
# Order ids that ascend as they come, and ids that come in no order: a multiplication by an odd number modulo a power
# of two gives each number once. Indexes over the latter are filled, and later read, all over the place.
_IDS = {ORDERED: "printf('order-%09d', i)", RANDOM: "printf('%08x', (i * 1103515245) % 2147483648)"}
MOST = 2**31 - 1


def fill(database: Database, count: int, ids: str) -> None:
    """`count` orders with their events, taken by every built-in receiver; every tenth is in euro."""
    connection = sqlite3.connect(str(database.url.database), isolation_level=None)
    try:
        # As fast as can be: what is measured begins afterwards, and a power loss means another run.
        for pragma in ("synchronous = OFF", "cache_size = -1048576"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _statements(count, ids):
            connection.execute(statement)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def _statements(count: int, ids: str) -> Sequence[str]:
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
    events = f"FROM outbox WHERE event_type = '{ORDER_PLACED}' ORDER BY position"
    amount, currency, order_id = (f"json_extract(payload, '$.{key}')" for key in ("amount", "currency", "order_id"))
    return (
        "INSERT INTO orders (id, sku, qty, amount, currency, placed_at) "
        f"{numbers} SELECT {_IDS[ids]}, 'sku-' || i % 10, 1, 100 + i, CASE WHEN i % 10 THEN 'JPY' ELSE 'EUR' END, 1 "
        "FROM n",
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status, published_at, "
        "first_published_at, fanned_out_at) "
        f"SELECT id || ':placed', 'order/' || id, 1, '{ORDER_PLACED}', "
        "json_object('amount', amount, 'currency', currency, 'order_id', id, 'qty', qty, 'sku', sku), "
        "'PUBLISHED', 1, 1, 1 FROM orders ORDER BY rowid",
        *(
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status) "
            f"SELECT '{name}', position, aggregate_id, seq, 'done' {events}"
            for name in sorted(receiver.name for receiver in RECEIVERS)
        ),
        f"INSERT INTO billing_entries SELECT position, {order_id}, {amount}, {currency} {events}",
        f"INSERT INTO mail_messages SELECT position, {order_id}, 'We received your order ' || {order_id} {events}",
        f"INSERT INTO sales_applied SELECT '{INITIAL}', position, {amount}, {currency} {events}",
        f"INSERT INTO sales_totals SELECT '{INITIAL}', currency, count(*), sum(amount) FROM sales_applied "
        "GROUP BY currency",
    )

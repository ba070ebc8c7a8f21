"""The floor under the floor: the same rows written by hand with sqlite3 and redis, without SQLAlchemy or Temporal.

The same tables and indexes, the same settings of the database (WAL, synchronous=FULL), the same Valkey, one
transaction a batch, a list that is trimmed only of what was fanned out; and one statement for a batch wherever SQLite
is quicker with that than with a statement a row. It has none of the rest: no order within an aggregate, no failing
event, no twin, no junk in the list, no fair lock.
"""

import json
import sqlite3
import time
from typing import Any

import redis

from contracts.names import OUTBOX_LIST
from receivers.registry import RECEIVERS
from store.clock import now_ms

_BATCH = 2000
_TRIM = """
local head, taken = redis.call('LRANGE', KEYS[1], 0, #ARGV - 1), 0
for i = 1, #ARGV do
  if head[taken + 1] == ARGV[i] then taken = taken + 1 end
end
redis.call('LTRIM', KEYS[1], taken, -1)
"""
_GIVEN = "SELECT value FROM json_each(?)"
_ORDER = "json_extract(payload, '$.order_id')"
_MONEY = "json_extract(payload, '$.amount'), json_extract(payload, '$.currency')"
_EFFECTS = {
    "billing": f"INSERT INTO billing_entries SELECT position, {_ORDER}, {_MONEY} ",
    "mail": f"INSERT INTO mail_messages SELECT position, {_ORDER}, 'We received your order ' || {_ORDER} ",
    "sales": f"INSERT INTO sales_applied SELECT 'initial', position, {_MONEY} ",
}


class HandWritten:
    """Relay, fan-out and receivers in turn."""

    def __init__(self, path: str, redis_url: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "cache_size=-32768"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._redis: Any = redis.Redis.from_url(redis_url)
        self._trim = self._redis.register_script(_TRIM)

    def drain(self) -> float:
        """Until nothing moves; the seconds that it took."""
        started = time.monotonic()
        while self._relay() + self._fan_out() + sum(self._receive(receiver.name) for receiver in RECEIVERS):
            pass
        return time.monotonic() - started

    def close(self) -> None:
        """Give the connections back."""
        self._connection.close()
        self._redis.close()

    def _relay(self) -> int:
        rows = self._connection.execute(
            "SELECT position, event_id FROM outbox WHERE status = 'PENDING' ORDER BY position LIMIT ?", (_BATCH,)
        ).fetchall()
        if rows:
            self._redis.rpush(OUTBOX_LIST, *(row[1] for row in rows))
            now = now_ms()
            with self._transaction():
                self._connection.execute(
                    "UPDATE outbox SET status = 'PUBLISHED', published_at = ?, first_published_at = ? "
                    f"WHERE position IN ({_GIVEN})",
                    (now, now, json.dumps([row[0] for row in rows])),
                )
        return len(rows)

    def _fan_out(self) -> int:
        entries = self._redis.lrange(OUTBOX_LIST, 0, _BATCH - 1)
        if entries:
            with self._transaction():
                found = self._connection.execute(
                    f"SELECT position FROM outbox WHERE event_id IN ({_GIVEN})",
                    (json.dumps([entry.decode() for entry in entries]),),
                )
                positions = json.dumps(sorted(row[0] for row in found))
                for receiver in RECEIVERS:
                    self._connection.execute(
                        "INSERT INTO deliveries (receiver, position, aggregate_id, seq) "
                        f"SELECT ?, position, aggregate_id, seq FROM outbox WHERE position IN ({_GIVEN})",
                        (receiver.name, positions),
                    )
                self._connection.execute(
                    f"UPDATE outbox SET fanned_out_at = ? WHERE position IN ({_GIVEN})", (now_ms(), positions)
                )
            self._trim(keys=[OUTBOX_LIST], args=entries)
        return len(entries)

    def _receive(self, receiver: str) -> int:
        with self._transaction():
            positions = [
                row[0]
                for row in self._connection.execute(
                    "SELECT position FROM deliveries INDEXED BY deliveries_pending "
                    "WHERE receiver = ? AND status = 'pending' ORDER BY position LIMIT ?",
                    (receiver, _BATCH),
                )
            ]
            if positions:
                given = (json.dumps(positions),)
                self._connection.execute(f"{_EFFECTS[receiver]} FROM outbox WHERE position IN ({_GIVEN})", given)
                if receiver == "sales":
                    self._connection.execute(
                        "INSERT INTO sales_totals SELECT generation, currency, count(*), sum(amount) "
                        f"FROM sales_applied WHERE generation = 'initial' AND position IN ({_GIVEN}) GROUP BY 1, 2 "
                        "ON CONFLICT DO UPDATE SET orders = orders + excluded.orders, "
                        "amount = amount + excluded.amount",
                        given,
                    )
                self._connection.execute(
                    f"UPDATE deliveries SET status = 'done' WHERE receiver = ? AND position IN ({_GIVEN})",
                    (receiver, *given),
                )
        return len(positions)

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)


class _Transaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")

"""What a peer does for an event and for a job, in plain sqlite3: all of Saisei's rows, in its tables.

An event is one transaction here, with its three effects and three `done` at once: fewer than any system would need
that tells its receivers apart, so that no peer is slow for the sake of our design. The database has the settings that
ours has. Needs nothing but Python: it is imported where Saisei's packages are not.
"""

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

DATABASE, REDIS = "PEER_DATABASE", "PEER_REDIS"
_local = threading.local()


@contextmanager
def using(path: str) -> Iterator[None]:
    """This process works on that database for the block."""
    os.environ[DATABASE] = path
    try:
        yield
    finally:
        del os.environ[DATABASE]


def say_ready() -> None:
    """Tell whoever started this process. In one write: of two processes that share an output, both lines arrive whole,
    also where Python does not buffer it."""
    os.write(sys.stdout.fileno(), b"ready\n")


def pending() -> list[str]:
    """Ids of the events that nobody has taken."""
    rows = _connection().execute("SELECT event_id FROM outbox WHERE status = 'PENDING' ORDER BY position")
    return [row[0] for row in rows.fetchall()]


def deliver(event_id: str) -> None:
    """The event at every receiver, once however often this is called."""
    with _transaction() as connection:
        row = connection.execute(
            "SELECT position, aggregate_id, seq, payload FROM outbox WHERE event_id = ? AND status = 'PENDING'",
            (event_id,),
        ).fetchone()
        if row is None:
            return
        position, aggregate_id, seq, text = row
        payload = json.loads(text)
        order, amount, currency = payload["order_id"], payload["amount"], payload["currency"]
        now = time.time_ns() // 1_000_000
        connection.execute("INSERT INTO billing_entries VALUES (?, ?, ?, ?)", (position, order, amount, currency))
        connection.execute(
            "INSERT INTO mail_messages VALUES (?, ?, ?)", (position, order, f"We received your order {order}")
        )
        connection.execute("INSERT INTO sales_applied VALUES ('initial', ?, ?, ?)", (position, amount, currency))
        connection.execute(
            "INSERT INTO sales_totals VALUES ('initial', ?, 1, ?) ON CONFLICT DO UPDATE "
            "SET orders = orders + 1, amount = amount + excluded.amount",
            (currency, amount),
        )
        connection.executemany(
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status) VALUES (?, ?, ?, ?, 'done')",
            [(receiver, position, aggregate_id, seq) for receiver in ("billing", "mail", "sales")],
        )
        connection.execute(
            "UPDATE outbox SET status = 'PUBLISHED', published_at = ?, first_published_at = ?, fanned_out_at = ? "
            "WHERE position = ?",
            (now, now, now, position),
        )


def begin(job: str) -> None:
    """The job's row."""
    with _transaction() as connection:
        connection.execute(
            "INSERT INTO jobs (job_id, amount, state, created_at, look_at) VALUES (?, 100, 'RUNNING', 1, 1)", (job,)
        )


def charge(job: str) -> None:
    """The first step, once."""
    with _transaction() as connection:
        _charge(connection, job)


def ship(job: str) -> None:
    """The second step, once, and the job's end."""
    with _transaction() as connection:
        _ship(connection, job)


def fulfil(job: str) -> None:
    """Both steps in one transaction, for who need not tell anybody between them."""
    with _transaction() as connection:
        _charge(connection, job)
        _ship(connection, job)


def _charge(connection: sqlite3.Connection, job: str) -> None:
    _step(connection, job, "charge", 1, "INSERT INTO charges VALUES (?, 100, 1)", "payment-captured", {"amount": 100})


def _ship(connection: sqlite3.Connection, job: str) -> None:
    _step(connection, job, "ship", 2, "INSERT INTO shipments VALUES (?, 1)", "order-shipped", {})
    connection.execute("UPDATE jobs SET state = 'COMPLETED' WHERE job_id = ?", (job,))


def _step(
    connection: sqlite3.Connection, job: str, step: str, position: int, effect: str, event: str, more: dict[str, int]
) -> None:
    done = connection.execute("SELECT 1 FROM job_steps WHERE job_id = ? AND step = ?", (job, step)).fetchone()
    if done is not None:
        return
    connection.execute(effect, (job,))
    connection.execute("INSERT INTO job_steps VALUES (?, ?, ?, 1)", (job, step, position))
    connection.execute(
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload) VALUES (?, ?, ?, ?, ?)",
        (f"{job}:{event}", f"job/{job}", position, event, json.dumps({"job_id": job, **more})),
    )


def _connection() -> sqlite3.Connection:
    # One for each thread of each process: a forked one must not use its parent's.
    key = os.getpid()
    if getattr(_local, "process", None) != key:
        _local.process = key
        _local.connection = sqlite3.connect(os.environ[DATABASE], isolation_level=None, timeout=60)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "cache_size=-32768"):
            _local.connection.execute(f"PRAGMA {pragma}")
    connection: sqlite3.Connection = _local.connection
    return connection


@contextmanager
def _transaction() -> Iterator[sqlite3.Connection]:
    connection = _connection()
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")

"""A scratch stack: servers, database and worker in a temporary folder, gone afterwards."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts import search
from contracts.errors import SaiseiError
from contracts.events import ORDER_PLACED, payload_text
from contracts.identifiers import order_aggregate, order_placed_id
from contracts.orders import Order
from embedded import TemporalServer, ValkeyServer
from receivers.registry import RECEIVERS
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from store.outbox import outbox_at_rest
from store.receivers import register_receiver
from store.schema import deliveries, orders, outbox

ROOT = Path(__file__).resolve().parent.parent
RECEIVER_NAMES = tuple(receiver.name for receiver in RECEIVERS)
_PATIENCE = 600.0


class Scratch:
    """Both servers and an empty database."""

    def __init__(self, home: Path, temporal: TemporalServer, valkey: ValkeyServer) -> None:
        self.home = home
        self.temporal_address = temporal.address
        self.redis_url = valkey.url
        self.database = open_database(home / "saisei.db")

    @contextlib.contextmanager
    def worker(self, *program: str) -> Iterator[int]:
        """A worker process for the block, ready when it begins; its process id. `program`: arguments of Python, if not
        the worker as it is."""
        log = self.home / "worker.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *(program or (str(ROOT / "worker.py"),))],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(lambda: process.poll() is not None or b"worker ready" in log.read_bytes(), 0.05)
            if process.poll() is not None:
                raise SaiseiError(f"the worker did not start: {log.read_text(errors='replace')[-500:]}")
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _environment(self) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TEMPORAL_", "SAISEI_"))}
        return kept | {
            "SAISEI_HOME": str(self.home),
            "DATABASE_URL": f"sqlite:///{self.home / 'saisei.db'}",
            "TEMPORAL_ADDRESS": self.temporal_address,
            "REDIS_URL": self.redis_url,
        }


@contextlib.contextmanager
def scratch() -> Iterator[Scratch]:
    """A scratch stack for the block."""
    with tempfile.TemporaryDirectory(prefix="saisei-bench-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        servers = (
            TemporalServer(home, headless=True, search_attributes=search.START_DEV),
            ValkeyServer(home),
        )
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()
            stack = Scratch(home, *servers)
            try:
                yield stack
            finally:
                stack.database.close()
        finally:
            for server in servers:
                server.stop()


def open_database(path: Path) -> Database:
    """A database that is set up, with the built-in receivers registered."""
    database = Database(f"sqlite:///{path}")

    def prepare(connection: Connection) -> None:
        initialize(connection, now_ms())
        for receiver in RECEIVERS:
            register_receiver(connection, receiver.name, receiver.event_types)

    with database.write() as connection:
        prepare(connection)
    return database


def record(database: Database, count: int) -> None:
    """`count` orders with their events, as intake writes them, in one transaction."""
    placed = [Order(f"bench-{number}", f"sku-{number % 10}", 1, 100 + number, "JPY") for number in range(count)]
    now = now_ms()
    with database.write() as connection:
        connection.execute(
            sa.insert(orders),
            [
                {"id": o.id, "sku": o.sku, "qty": o.qty, "amount": o.amount, "currency": o.currency, "placed_at": now}
                for o in placed
            ],
        )
        connection.execute(
            sa.insert(outbox),
            [
                {
                    "event_id": order_placed_id(o.id),
                    "aggregate_id": order_aggregate(o.id),
                    "seq": 1,
                    "event_type": ORDER_PLACED,
                    "payload": payload_text(o.payload()),
                }
                for o in placed
            ],
        )


def is_done(connection: Connection, receiver: str) -> bool:
    """Whether the receiver has taken all that was recorded. Reads partial indexes that are empty by then: counting
    would take from the pipeline what it is measured by."""
    if not outbox_at_rest(connection):
        return False
    waiting = sa.select(deliveries.c.position).where(
        deliveries.c.receiver == receiver, sa.text("deliveries.status = 'pending'")
    )
    return connection.execute(waiting.limit(1)).first() is None


def wait_for(predicate: Callable[[], bool], every: float) -> None:
    """Ask every so many seconds until it is true. Raises SaiseiError after ten minutes."""
    deadline = time.monotonic() + _PATIENCE
    while not predicate():
        if time.monotonic() > deadline:
            raise SaiseiError(f"nothing came of it within {_PATIENCE:g} s")
        time.sleep(every)

"""A scratch stack: servers, database and worker in a temporary folder, gone afterwards."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from contracts import search
from contracts.errors import SaiseiError
from contracts.events import ORDER_PLACED, payload_text
from contracts.identifiers import order_aggregate, order_placed_id
from contracts.orders import Order
from embedded import TemporalServer, ValkeyServer
from embedded.tied import tie
from receivers.registry import RECEIVERS
from store.audit import audit
from store.clock import now_ms
from store.control import initialize
from store.deliveries import DONE, first_next
from store.engine import Database
from store.outbox import outbox_at_rest
from store.receivers import register_receiver
from store.schema import orders, outbox

ROOT = Path(__file__).resolve().parent.parent
RECEIVER_NAMES = tuple(receiver.name for receiver in RECEIVERS)
_PATIENCE = 600.0
_AT_ONCE = 100_000


class Scratch:
    """Both servers and an empty database."""

    def __init__(self, home: Path, temporal: TemporalServer, valkey: ValkeyServer) -> None:
        self.home = home
        self.temporal_address = temporal.address
        self.redis_url = valkey.url
        self.database = open_database(home / "saisei.db")
        self._programs = 0

    @contextlib.contextmanager
    def worker(
        self,
        program: Sequence[str] = ("worker.py",),
        database: Database | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A worker process on that database (the stack's if not said) for the block, ready when it begins."""
        with self.program(program, "worker ready", database, env) as (process, _):
            yield process

    @contextlib.contextmanager
    def program(
        self,
        arguments: Sequence[str],
        ready: str,
        database: Database | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
        """A Python program of ours for the block: its process, and the line with which it said that it is ready."""
        self._programs += 1
        log = self.home / f"program-{self._programs}.log"
        with log.open("wb") as output:
            process = tie(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env={**self._environment(database or self.database), **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

        def said() -> list[str]:
            return [line for line in log.read_text(errors="replace").splitlines() if ready in line]

        try:
            wait_for(lambda: process.poll() is not None or bool(said()), 0.05)
            if process.poll() is not None:
                raise SaiseiError(f"{arguments[0]} did not start: {log.read_text(errors='replace')[-500:]}")
            yield process, said()[0]
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def another_database(self) -> Iterator[Database]:
        """An empty database beside the stack's, for the block."""
        with tempfile.TemporaryDirectory(dir=self.home, prefix="database-") as folder:
            database = open_database(Path(folder) / "saisei.db")
            try:
                yield database
            finally:
                database.close()

    def _environment(self, database: Database) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TEMPORAL_", "SAISEI_"))}
        return kept | {
            "SAISEI_HOME": str(self.home),
            "DATABASE_URL": database.url.render_as_string(),
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


@contextlib.contextmanager
def beside(module: str, *arguments: str) -> Iterator[list[Any]]:
    """`python -m module arguments` for the block. It measures until its input closes; the JSON document that it prints
    then is in the list after the block."""
    process = tie(
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )
    printed: list[Any] = []
    try:
        yield printed
        output, _ = process.communicate(timeout=60)  # closes its input
        printed.append(json.loads(output))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


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


def order_ids(count: int, *, ordered: bool = True, prefix: str = "bench") -> list[str]:
    """Ids that ascend as texts, or random ones (the same at each call). All have one length, a UUID's: eight
    digits beside thirty-two would measure how many pages longer ids fill, and not their order alone."""
    if ordered:
        return [f"{prefix}-{number:032x}" for number in range(count)]
    generator = random.Random(prefix)
    return [f"{prefix}-{generator.getrandbits(128):032x}" for _ in range(count)]


def record(database: Database, ids: Sequence[str], *, sku: Callable[[int], str] | None = None) -> None:
    """Orders of these ids with their events, as intake writes them."""
    for start in range(0, len(ids), _AT_ONCE):
        placed = [
            Order(ids[number], sku(number) if sku else f"sku-{number % 10}", 1, 100 + number, "JPY")
            for number in range(start, min(start + _AT_ONCE, len(ids)))
        ]
        now = now_ms()
        with database.write() as connection:
            connection.execute(
                sa.insert(orders),
                [
                    {"id": o.id, "sku": o.sku, "qty": o.qty, "amount": o.amount, "currency": o.currency}
                    | {"placed_at": now}
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
    """Whether the receiver has taken all of the recorded events that it can. Reads partial indexes that are empty by
    then: counting would take from the pipeline what it is measured by."""
    return outbox_at_rest(connection) and first_next(connection, receiver) is None


def require_clean(database: Database, events: int) -> None:
    """Raises SaiseiError unless the audit is clean and each receiver has done exactly so many events."""
    with database.read() as connection:
        found = audit(connection)
    if not found.clean:
        raise SaiseiError(f"the audit is not clean: {found.breaks[0]}")
    for counts in found.receivers:
        if counts.states[DONE] != events:
            raise SaiseiError(f"{counts.receiver} has done {counts.states[DONE]} of {events} events")


def wait_for(predicate: Callable[[], bool], every: float) -> None:
    """Ask every so many seconds until it is true. Raises SaiseiError after ten minutes."""
    deadline = time.monotonic() + _PATIENCE
    while not predicate():
        if time.monotonic() > deadline:
            raise SaiseiError(f"nothing came of it within {_PATIENCE:g} s")
        time.sleep(every)

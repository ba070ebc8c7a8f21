"""A rebuild of the sales totals by a real worker: its phases, the longest write transaction, memory, audit.

Twice, with order ids that ascend and with ids that come in no order; memory beside a rebuild of a tenth of the orders,
or of 100,000.
The floor is the same work as plain SQL, on the same file, in the same run: the whole history in one INSERT, its totals
in a second, and one join that compares orders and generation by id, amount and currency in both directions, twice.
Beside seconds there is the processor time of either, which a busy machine distorts less.
"""

import asyncio
import os
import sqlite3
import threading
import time
from dataclasses import dataclass

import psutil
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHistory

from bench.history import MOST, ORDERED, RANDOM, fill
from bench.report import Row, percentile, row
from bench.stack import Scratch, scratch
from contracts.errors import InvalidInput, SaiseiError
from contracts.events import ORDER_PLACED
from contracts.messages import RebuildInput
from runs.starts import Runs
from store.audit import audit
from store.engine import Database

_MOST_RATIO = 3.0
_MOST_DATABASE_S = 10.0
_MOST_MEMORY_RATIO = 1.25
_MOST_AUDIT_S = 5.0
_MILLION = 1_000_000
_SMALL = 100_000  # by then the caches of the worker's connections are full, and memory tells of the orders' number
COUNT = _MILLION
FEWER = 200_000
_PHASES = (
    ("await_drained", "drained, expected set fixed"),
    ("replay", "replay"),
    ("reconcile", "reconcile"),
    ("seal", "seal"),
    ("certify", "reconcile again, certify"),
    ("activate", "activate"),
    ("forget_expected", "expected set removed, afterwards"),
)
_PROVED = ("replay", "reconcile", "certify")


@dataclass(frozen=True)
class _Measured:
    """One rebuild. Seconds by activity, and of processor time; both of the plain SQL: `floor`, `floor_busy`;
    transactions in seconds; memory in MB."""

    phases: dict[str, float]
    busy: dict[str, float]
    whole: float
    floor: dict[str, float]
    floor_busy: dict[str, float]
    transactions: list[float]
    before: float
    peak: float
    after: float
    audit: float


def run(count: int) -> list[Row]:
    """`count` recorded and delivered orders."""
    if count > MOST:
        raise InvalidInput({"--count": f"must be at most {MOST:,}"})
    rows = [row("load of the machine, 1 min", os.getloadavg()[0], "")]
    small = _measure(min(count, max(count // 10, _SMALL)), RANDOM)
    for ids in (ORDERED, RANDOM):
        rows += _rows(ids, count, _measure(count, ids), small)
    rows.append(row("load of the machine, 1 min, afterwards", os.getloadavg()[0], ""))
    return rows


def _rows(ids: str, count: int, found: _Measured, small: _Measured) -> list[Row]:
    rows = [row(f"{ids} ids: {words}", found.phases[name], "s") for name, words in _PHASES]
    rows[1] = row(rows[1].name, rows[1].value, "s", floor=found.floor["replay"])
    for number in (2, 4):
        rows[number] = row(rows[number].name, rows[number].value, "s", floor=found.floor["compare"])
    proved = sum(found.phases[name] for name in _PROVED)
    floor = found.floor["replay"] + 2 * found.floor["compare"]
    most = max(1.0, _MOST_DATABASE_S * count / _MILLION)
    rows.append(
        row(f"{ids} ids: replay and both reconciliations", proved, "s", floor=floor, most=_MOST_RATIO, by="ratio")
    )
    rows.append(row(f"{ids} ids: the same, seconds allowed", proved, "s", most=most))
    busy = sum(found.busy[name] for name in _PROVED)
    floor = found.floor_busy["replay"] + 2 * found.floor_busy["compare"]
    words = f"{ids} ids: replay and both reconciliations, processor time"
    rows.append(row(words, busy, "s", floor=floor, most=_MOST_RATIO, by="ratio"))
    rows.append(row(f"{words}, seconds allowed", busy, "s", most=most))
    rows.append(row(f"{ids} ids: asked for until activated", found.whole, "s"))
    held = sorted(found.transactions)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        rows.append(row(f"{ids} ids: write transaction, {name}", percentile(held, share) * 1000, "ms"))
    rows.append(row(f"{ids} ids: worker's memory before", found.before, "MB"))
    rows.append(
        row(
            f"{ids} ids: worker's memory, peak",
            found.peak,
            "MB",
            floor=small.peak,
            most=_MOST_MEMORY_RATIO,
            by="ratio",
        )
    )
    rows.append(row(f"{ids} ids: worker's memory after", found.after, "MB"))
    rows.append(row(f"{ids} ids: audit", found.audit, "s", most=max(1.0, _MOST_AUDIT_S * count / _MILLION)))
    return rows


def _measure(count: int, ids: str) -> _Measured:
    with scratch() as stack:
        fill(stack.database, count, ids)
        floor, floor_busy = _plain_sql(stack.database)
        log = stack.home / "transactions"
        with stack.worker(("-m", "bench.measured_worker", str(log))) as process:
            watch = _Watch(process.pid)
            before = watch.memory()
            with watch:
                began = time.time()
                history = asyncio.run(_rebuild(stack, count))
            spans = _spans(history)
            after = watch.memory()
        started = time.monotonic()
        with stack.database.read() as connection:
            found = audit(connection)
        audited = time.monotonic() - started
        if not found.clean or found.generation != "generation-1":
            raise SaiseiError(f"the audit after the rebuild found {found.breaks or found.generation}")
        lines = [line.split() for line in log.read_text().splitlines()]
        held = [float(seconds) for ended, seconds in lines if float(ended) >= began]
        phases = {name: end - start for name, (start, end) in spans.items()}
        busy = {name: watch.busy(start, end) for name, (start, end) in spans.items()}
        whole = spans["activate"][1] - spans["begin_rebuild"][0]
        return _Measured(phases, busy, whole, floor, floor_busy, held, before, watch.peak, after, audited)


async def _rebuild(stack: Scratch, count: int) -> WorkflowHistory:
    handle = await Runs(await Client.connect(stack.temporal_address), []).start_rebuild(RebuildInput())
    report = await handle.result()
    if (report["state"], report["expected"], report["replayed"]) != ("COMPLETED", count, count):
        raise SaiseiError(f"the rebuild came to {report}")
    return await handle.fetch_history()


def _spans(history: WorkflowHistory) -> dict[str, tuple[float, float]]:
    """When each activity began and ended, in seconds since 1970."""
    kinds: dict[int, str] = {}
    began: dict[int, float] = {}
    spans: dict[str, tuple[float, float]] = {}
    for event in history.events:
        at = event.event_time.seconds + event.event_time.nanos / 1e9
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            kinds[event.event_id] = event.activity_task_scheduled_event_attributes.activity_type.name
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
            began[event.activity_task_started_event_attributes.scheduled_event_id] = at
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            number = event.activity_task_completed_event_attributes.scheduled_event_id
            spans[kinds[number]] = (began[number], at)
    return spans


class _Watch:
    """A process's memory in MB and its processor time, looked at fifty times a second within its block."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._looks: list[tuple[float, float]] = []
        self.peak = 0.0

    def memory(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    def busy(self, start: float, end: float) -> float:
        """Seconds of processor time between two instants, to a fiftieth or so."""
        before = [spent for at, spent in self._looks if at <= start] or [self._looks[0][1]]
        until = [spent for at, spent in self._looks if at <= end]
        return until[-1] - before[-1]

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, self.memory())
            spent = self._process.cpu_times()
            self._looks.append((time.time(), spent.user + spent.system))


# Read along the outbox, each side one look-up a row; or along the orders. Which is quicker depends on the ids.
_COMPARE = (
    "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM sales_applied WHERE generation = 'floor'), "
    "(SELECT count(*) FROM orders CROSS JOIN outbox ON outbox.event_id = orders.id || ':placed' "
    "CROSS JOIN sales_applied ON sales_applied.generation = 'floor' AND sales_applied.position = outbox.position "
    "WHERE sales_applied.amount = orders.amount AND sales_applied.currency = orders.currency)",
    "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM sales_applied WHERE generation = 'floor'), "
    "(SELECT count(*) FROM sales_applied CROSS JOIN outbox ON outbox.position = sales_applied.position "
    "CROSS JOIN orders ON orders.id = substr(outbox.event_id, 1, length(outbox.event_id) - 7) "
    "WHERE sales_applied.generation = 'floor' "
    "AND sales_applied.amount = orders.amount AND sales_applied.currency = orders.currency)",
)


def _plain_sql(database: Database) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of its two parts, and of processor time."""
    connection = sqlite3.connect(str(database.url.database), isolation_level=None)
    try:
        for pragma in ("synchronous = FULL", "cache_size = -32768"):
            connection.execute(f"PRAGMA {pragma}")
        started, spent = time.monotonic(), time.process_time()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO sales_applied SELECT 'floor', position, json_extract(payload, '$.amount'), "
            f"json_extract(payload, '$.currency') FROM outbox WHERE event_type = '{ORDER_PLACED}'"
        )
        connection.execute(
            "INSERT INTO sales_totals SELECT 'floor', currency, count(*), sum(amount) FROM sales_applied "
            "WHERE generation = 'floor' GROUP BY currency"
        )
        connection.execute("COMMIT")
        replayed = (time.monotonic() - started, time.process_time() - spent)
        compared = []
        for statement in _COMPARE:
            started, spent = time.monotonic(), time.process_time()
            counts = set(connection.execute(statement).fetchone())
            compared.append((time.monotonic() - started, time.process_time() - spent))
            if len(counts) != 1:
                raise SaiseiError(f"the plain SQL compares {counts}")
        for table in ("sales_applied", "sales_totals"):
            connection.execute(f"DELETE FROM {table} WHERE generation = 'floor'")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        best = min(compared)
        return {"replay": replayed[0], "compare": best[0]}, {"replay": replayed[1], "compare": best[1]}
    finally:
        connection.close()

"""The outbox, step by step: what is lost without it, what it costs (duplicates), and how these are absorbed.

Runs the product's own store, relay and fan-out, one after the other, on a database in a folder that the caller names
and on a scratch Valkey. What it writes was counted, not hoped for."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis
import sqlalchemy as sa
from sqlalchemy import Connection

from contracts.counts import counted
from contracts.errors import InvalidInput, Refused, Unreachable
from contracts.events import PAYMENT_CAPTURED
from contracts.identifiers import job_aggregate, order_aggregate, payment_captured_id
from contracts.messages import DrainReport
from contracts.names import OUTBOX_LIST, PROCESSED_HASH
from contracts.orders import Order
from labs.scratch import Scratch, make_folder
from labs.verdict import Verdict
from pipeline import event_list
from pipeline.event_list import EventList
from pipeline.fan_out import FanOutStage
from pipeline.hub import Hub
from pipeline.relay import RelayStage
from pipeline.stage import Limits, Stage, drain
from pipeline.writer import Writer
from store.clock import iso, now_ms
from store.control import initialize
from store.engine import Database, sqlite_url
from store.orders import place_order, record_order
from store.outbox import append_event, events_of
from store.schema import PENDING, outbox
from store.status import count_orders, outbox_status

MOST_ORDERS = 100_000
OUTPUTS = ("dualwrite.out", "order_check.out", "atleastonce.out", "report.txt")
_DATABASE, _DUAL_WRITE = "app.db", "dualwrite.db"
# In the header of the databases that this walk-through makes: only these does it ever replace.
_APPLICATION_ID = 0x5A15E1AB
_AGGREGATES, _EVENTS_EACH = 3, 4  # of the order check
_SHOWN_COLUMNS = {
    "orders": ("id", "sku", "qty"),
    "outbox": ("event_id", "aggregate_id", "seq", "event_type", "payload", "status"),
}


@dataclass(frozen=True)
class Step:
    """What one of the eight steps showed, in one line."""

    name: str
    showed: str


@dataclass(frozen=True)
class Outcome:
    """The verdict with the steps behind it."""

    verdict: Verdict
    steps: list[Step]


class _TakenBack(Exception):
    """Raised to roll a transaction back."""


class RelayDied(Exception):
    """The relay of step 6 ends between the push and the mark."""


class _DyingRelay(RelayStage):
    """The product's relay up to the push; then it dies."""

    def _mark(self, connection: Connection, positions: list[int]) -> None:
        raise RelayDied


@contextlib.contextmanager
def lab_folder(folder: Path) -> Iterator[bool]:
    """The folder with new databases in it, for this process alone; whether an earlier run's were replaced.

    Raises Refused when it cannot be made, when it holds a database that this walk-through did not make, which stays as
    it is, or when another run is at work there.
    """
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another `lab outbox` is at work in {folder}; wait for it or name another folder") from None
        databases = [folder / _DATABASE, folder / _DUAL_WRITE]
        for path in databases:
            if os.path.lexists(path) and not _is_ours(path):
                text = f"{path} was not made by `lab outbox` and is left as it is; name another folder with --dir"
                raise Refused(text)
        afresh = any(path.exists() for path in databases)
        for name in OUTPUTS:
            (folder / name).unlink(missing_ok=True)
        for path in databases:
            _make(path)
        yield afresh
    finally:
        os.close(descriptor)


def _is_ours(path: Path) -> bool:
    """Whether the header of the file has our mark. Opening it as a database could change a foreign one."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as source:
        header = source.read(72)
    return header[:16] == b"SQLite format 3\0" and header[68:72] == _APPLICATION_ID.to_bytes(4, "big")


def _make(path: Path) -> None:
    """A new database with our mark, in one step: there is never one without it that a later run would refuse."""
    for suffix in ("-wal", "-shm", "-turn", "-writer"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(new)) as connection:
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute("CREATE TABLE first_page (x)")  # an empty database has no header yet
            connection.execute("DROP TABLE first_page")
            connection.commit()
    except sqlite3.Error as error:
        raise Unreachable(f"{path} cannot be written ({error}); name another folder with --dir") from error
    new.replace(path)


def check_orders(orders: int) -> None:
    """Raises InvalidInput for a count out of bounds."""
    if not 1 <= orders <= MOST_ORDERS:
        raise InvalidInput({"orders": f"must be from 1 to {MOST_ORDERS:,}"})


async def walk(
    folder: Path, orders: int, scratch: Scratch, tell: Callable[[Step], None], placed: Callable[[int], None]
) -> Outcome:
    """Take the eight steps in `folder`, which `lab_folder` holds; each goes to `tell` when it is done, and `placed`
    hears of every order. Raises InvalidInput for a count out of bounds."""
    check_orders(orders)
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(_open(folder / _DATABASE))
        writer = Writer(database)
        stack.callback(writer.close)
        events = EventList(event_list.connect(scratch.redis_url))
        stack.callback(events.close)
        client = stack.enter_context(event_list.connect(scratch.redis_url))
        steps = _Steps(folder, orders, tell, placed, database, writer, events, client)
        await steps.all()
        return Outcome(steps.verdict, steps.done)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(path))
    try:
        with database.write() as connection:
            initialize(connection, now_ms())
        yield database
    finally:
        database.close()


@dataclass
class _Steps:
    folder: Path
    orders: int
    tell: Callable[[Step], None]
    placed: Callable[[int], None]
    database: Database
    writer: Writer
    events: EventList
    client: "redis.Redis"
    verdict: Verdict = field(default_factory=lambda: Verdict("outbox"))
    done: list[Step] = field(default_factory=list)
    hub: Hub = field(default_factory=Hub)

    async def all(self) -> None:
        """The eight steps in order."""
        self._show("tables", self.tables())
        self._show("dual write", self.dual_write())
        self._show("one transaction", self.place())
        self._show("relay", await self.relay_twice())
        self._show("order", await self.order_check())
        self._show("relay dies", await self.relay_dies())
        self._show("consumer", await self.consume())
        self._show("report", self.report())

    def _show(self, name: str, showed: str) -> None:
        step = Step(name, showed)
        self.done.append(step)
        self.tell(step)

    def _write(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _count(self) -> tuple[int, int]:
        """(orders, events) in the database."""
        with self.database.read() as connection:
            return count_orders(connection), outbox_status(connection).total

    # 1
    def tables(self) -> str:
        """The two tables; the database itself makes an event PENDING."""
        with self.database.read() as connection:
            inspector = sa.inspect(connection)
            for table, wanted in _SHOWN_COLUMNS.items():
                columns = [column["name"] for column in inspector.get_columns(table)]
                missing = [name for name in wanted if name not in columns]
                self.verdict.require(not missing, f"the table {table} lacks {missing}")
        # A row that names no status, taken back again.
        statement = sa.insert(outbox).values(event_id="a", aggregate_id="a", seq=1, event_type="a", payload="{}")
        status = None
        with contextlib.suppress(_TakenBack), self.database.write() as connection:
            status = connection.execute(statement.returning(outbox.c.status)).scalar_one()
            raise _TakenBack
        self.verdict.require(status == PENDING, f"an event without a status must be {PENDING}, but is {status}")
        shown = [f"{table}({', '.join(columns)})" for table, columns in _SHOWN_COLUMNS.items()]
        return f"{', '.join(shown)}; a row without a status is {status}"

    # 2
    def dual_write(self) -> str:
        """Saving and publishing one after the other, without an outbox: the broker refuses, and nobody notices."""
        with _open(self.folder / _DUAL_WRITE) as database:
            order = _order(1)
            with database.write() as connection:
                record_order(connection, order, now_ms())
            refusal = ""
            # The product's Valkey evicts nothing: out of memory, it refuses what would grow it.
            self.client.config_set("maxmemory", 1)
            try:
                self.events.push([order.id])
            except redis.RedisError as error:
                refusal = str(error)
            finally:
                self.client.config_set("maxmemory", 0)
            with database.read() as connection:
                orders = count_orders(connection)
        published = self.events.length()
        line = f"{'INCONSISTENT' if orders != published else 'CONSISTENT'} orders={orders} published={published}"
        self._write("dualwrite.out", line)
        self.verdict.require(bool(refusal), "the broker must have refused the push, but took it")
        self.verdict.require(orders != published, f"the dual write must leave a gap, but left {line}")
        return f"{line} (the broker refused the push after the order was saved)"

    # 3
    def place(self) -> str:
        """Order and event in one transaction: both or neither."""
        for number in range(1, self.orders + 1):
            with self.database.write() as connection:
                place_order(connection, _order(number), now_ms())
            self.placed(number)
        with contextlib.suppress(_TakenBack), self.database.write() as connection:
            place_order(connection, _order(self.orders + 1), now_ms())
            raise _TakenBack
        orders, events = self._count()
        self.verdict.require(
            orders == events == self.orders,
            f"both tables must have a row for each of {self.orders}, but have {orders} and {events}",
        )
        return f"orders={orders} outbox={events}; one that failed before its commit left neither"

    # 4
    async def relay_twice(self) -> str:
        """The relay moves what is PENDING, once."""
        await self._drain(self._relay())
        first = self.events.length()
        again = await self._drain(self._relay())
        second = self.events.length()
        self.verdict.require(first == self.orders, f"the list must hold {self.orders}, but holds {first}")
        self.verdict.require(
            second == first and again.events == 0, f"a second relay must push nothing, but the list grew to {second}"
        )
        return f"{OUTBOX_LIST} holds {first} after the first run, {second} after the second"

    # 5
    async def order_check(self) -> str:
        """Several aggregates, several events each, all of one millisecond: only `seq` can tell their order."""
        moment = iso(now_ms())
        with self.database.write() as connection:
            for turn in range(_EVENTS_EACH):  # in turns, so that no aggregate's events lie side by side
                for number in range(1, _AGGREGATES + 1):
                    append_event(
                        connection,
                        # Ids that descend while `seq` ascends: sorting by id would be seen.
                        event_id=f"check-{number}:{_EVENTS_EACH - turn}",
                        aggregate_id=job_aggregate(f"check-{number}"),
                        event_type="order-check",
                        payload={"at": moment},
                    )
        await self._drain(self._relay())
        entries = [entry.decode() for entry in self.events.head(self.events.length())]
        with self.database.read() as connection:
            rows = connection.execute(sa.select(outbox.c.event_id, outbox.c.aggregate_id, outbox.c.seq)).all()
            checked = [
                row.event.payload["at"]
                for number in range(1, _AGGREGATES + 1)
                for row in events_of(connection, job_aggregate(f"check-{number}"))
            ]
        known = {row[0]: (row[1], row[2]) for row in rows}
        queued: dict[str, list[int]] = {}
        for entry in entries:
            aggregate, seq = known[entry]
            queued.setdefault(aggregate, []).append(seq)
        recorded: dict[str, list[int]] = {}
        for aggregate, seq in sorted(known.values()):
            recorded.setdefault(aggregate, []).append(seq)
        wrong = sorted(name for name in recorded if queued.get(name) != recorded[name])
        line = "ORDER OK" if not wrong else f"ORDER WRONG {' '.join(wrong)}"
        self._write("order_check.out", line)
        self.verdict.require(not wrong, f"the list must hold each aggregate in seq order, but not so {wrong}")
        self.verdict.require(
            len(checked) == _AGGREGATES * _EVENTS_EACH and set(checked) == {moment},
            "the events of the order check must all be of one millisecond",
        )
        return f"{line} ({_AGGREGATES} aggregates with {_EVENTS_EACH} events each, all of {moment})"

    # 6
    async def relay_dies(self) -> str:
        """Pushed and not marked: the next relay pushes it again."""
        with self.database.write() as connection:
            event, _ = append_event(
                connection,
                event_id=payment_captured_id(_order(1).id),
                aggregate_id=order_aggregate(_order(1).id),
                event_type=PAYMENT_CAPTURED,
                payload={"amount": _order(1).amount},
            )
        died = False
        try:
            await self._drain(_DyingRelay(self.writer, self.events, self.hub, lease=1))
        except RelayDied:
            died = True
        await self._drain(self._relay())
        count = self.events.count(event.event_id)
        line = f"{'DUPLICATE' if count > 1 else 'SINGLE'} event_id={event.event_id} count={count}"
        self._write("atleastonce.out", line)
        self.verdict.require(died, "the relay must have died between push and mark, but went on")
        self.verdict.require(count == 2, f"{event.event_id} must be in the list twice, but its count there is {count}")
        return f"{line} (pushed, not marked, pushed again)"

    # 7
    async def consume(self) -> str:
        """The fan-out drains the list; what it has seen by event id, it drops."""
        waiting = self.events.head(self.events.length())
        unique = len(set(waiting))
        report = await self._drain(FanOutStage(self.writer, self.events, self.hub, ()))
        processed, left = self.events.processed_count(), self.events.length()
        self.verdict.counts = {"drained": report.events, "left": left, "processed_unique": processed}
        told = f"of {len(waiting)} that waited {report.events} were drained and {left} are left"
        self.verdict.require(report.events + left == len(waiting), told)
        self.verdict.require(left == 0, f"the list must be empty, but holds {left}")
        self.verdict.require(processed == unique, f"{PROCESSED_HASH} must hold {unique}, but holds {processed}")
        return (
            f"drained {report.events}, dropped {report.events - processed} duplicate, "
            f"{PROCESSED_HASH} holds {processed}"
        )

    # 8
    def report(self) -> str:
        """The numbers of the whole way."""
        orders, events = self._count()
        enqueued = self.verdict.counts["drained"] + self.verdict.counts["left"]
        processed = self.events.processed_count()
        counts = {"orders": orders, "outbox": events, "enqueued": enqueued, "processed_unique": processed}
        lines = [f"{name}={number}" for name, number in counts.items()]
        self._write("report.txt", *lines)
        self.verdict.require(
            enqueued > processed == events >= orders == self.orders,
            f"every event must be processed once although one came twice, but the counts are {' '.join(lines)}",
        )
        self.verdict.counts = counts
        self.verdict.reason = (
            f"{counted(events, 'event')}, {enqueued - processed} of them twice in the list, each processed once"
        )
        return " ".join(lines)

    def _relay(self) -> RelayStage:
        return RelayStage(self.writer, self.events, self.hub, lease=1)

    async def _drain(self, stage: Stage) -> DrainReport:
        return await drain(
            stage, self.hub, Limits(idle=0, longest=600), stopping=lambda: False, beat=lambda events, batches: None
        )


def _order(number: int) -> Order:
    return Order(f"order-{number}", f"sku-{number % 10}", 1, 100 * number, "JPY")

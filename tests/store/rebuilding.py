"""A rebuild without Temporal: its store functions in the order of the saga, each in a transaction of its own."""

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.orders import Order
from store.control import read_control
from store.deliveries import mark_done, next_batch
from store.effects import apply_sales
from store.engine import Database
from store.generations import Generation, list_generations
from store.orders import place_order
from store.rebuild import (
    REBUILD,
    Rebuild,
    activate,
    begin_rebuild,
    expect_chunk,
    fail_rebuild,
    fix_history,
    forget_expected,
    get_rebuild,
    replay_chunk,
    seal,
    store_certificate,
)
from store.receivers import lock_receiver, register_receiver
from store.reconcile import Reconciliation, certificate_text, check_sums, read_range
from tests.store.scenes import order, publish, rows, spread

# What each step leads to, in the order of the saga.
BEGUN, FIXED, EXPECTED, REPLAYED, SEALED, CERTIFIED, ACTIVATED = STEPS = (
    "begun",
    "fixed",
    "expected",
    "replayed",
    "sealed",
    "certified",
    "activated",
)


def history(database: Database, orders: Iterable[Order | int], *, taken: bool = True) -> None:
    """These orders, placed and fanned out; `taken`: the receiver `sales` took them."""
    with database.write() as connection:
        register_receiver(connection, "sales", [ORDER_PLACED])
        for one in orders:
            place_order(connection, order(one) if isinstance(one, int) else one, 1)
    spread(database, *publish(database))
    if taken:
        take_sales(database)


def take_sales(database: Database, limit: int = 1000) -> int:
    """What the receiver `sales` may take now; how many events."""
    count = 0
    while True:
        with database.write() as connection:
            lock_receiver(connection, "sales")
            events = next_batch(connection, "sales", limit)
            apply_sales(connection, events)
            mark_done(connection, "sales", [event.position for event in events])
        if not events:
            return count
        count += len(events)


def begin(database: Database, run_id: str = "run-1", *, now: int = 10, **changes: Any) -> str:
    """The id of a rebuild that pauses intake from here on."""
    options = {"kind": REBUILD, "target": None, "resume": False} | changes
    with database.write() as connection:
        return begin_rebuild(connection, run_id, now=now, **options).rebuild_id


def reach(database: Database, rebuild_id: str, step: str, *, chunk: int = 1000) -> None:
    """Go on until the step is done, as the saga does after a death: what was done before is repeated if it may be."""
    for each in STEPS[1 : STEPS.index(step) + 1]:
        now = rebuild(database, rebuild_id)
        closed = now.until_position is not None and state(database, now.generation) != "BUILDING"
        if now.state != "COMPLETED" and not (each == REPLAYED and closed):
            _do(database, rebuild_id, each, chunk)


def _do(database: Database, rebuild_id: str, step: str, chunk: int) -> None:
    if step == FIXED:
        with database.write() as connection:
            assert fix_history(connection, rebuild_id, 11)
    elif step == EXPECTED:
        after: str | None = ""
        while after is not None:
            with database.write() as connection:
                after = expect_chunk(connection, rebuild_id, after, chunk)
    elif step == REPLAYED:
        position: int | None = 0
        while position is not None:
            with database.write() as connection:
                position = replay_chunk(connection, rebuild_id, position, chunk)
    elif step == SEALED:
        with database.write() as connection:
            seal(connection, rebuild_id)
    elif step == CERTIFIED:
        certify(database, rebuild_id)
    elif step == ACTIVATED:
        with database.write() as connection:
            activate(connection, rebuild_id, 12)


def rebuilt(database: Database, run_id: str = "run-1", **changes: Any) -> str:
    """A whole rebuild; the generation that is active now."""
    rebuild_id = begin(database, run_id, **changes)
    reach(database, rebuild_id, ACTIVATED)
    with database.write() as connection:
        forget_expected(connection, rebuild_id, 10_000)
        return get_rebuild(connection, rebuild_id).generation


def reconcile(database: Database, rebuild_id: str, *, limit: int = 1000) -> Reconciliation:
    """The comparison in ranges of `limit` events, sums included."""
    return _reconcile(database, rebuild_id, limit)[0]


def _reconcile(database: Database, rebuild_id: str, limit: int) -> tuple[Reconciliation, dict[str, list[int]]]:
    found = Reconciliation()
    generation = rebuild(database, rebuild_id).generation
    after: str | None = ""
    while after is not None:
        with database.read() as connection:
            part = read_range(connection, rebuild_id, generation, after, limit)
        found.add(part)
        after = part.last
    with database.read() as connection:
        sums = check_sums(connection, rebuild_id, generation, found)
    return found, sums


def certify(database: Database, rebuild_id: str) -> str:
    """The stored certificate. The generation must be sealed and equal."""
    found, sums = _reconcile(database, rebuild_id, 1000)
    assert found.problems() == []
    text = certificate_text(
        rebuild_id=rebuild_id,
        generation=rebuild(database, rebuild_id).generation,
        found=found,
        sums=sums,
        now_iso="2026-01-01T00:00:00.000Z",
    )
    with database.write() as connection:
        store_certificate(connection, rebuild_id, text)
    return text


def rebuild(database: Database, rebuild_id: str) -> Rebuild:
    """The rebuild as its row says."""
    with database.read() as connection:
        return get_rebuild(connection, rebuild_id)


def fail(database: Database, rebuild_id: str, error: str = "it was cancelled") -> Rebuild:
    with database.write() as connection:
        return fail_rebuild(connection, rebuild_id, error, 13)


def generation(database: Database, name: str) -> Generation | None:
    with database.read() as connection:
        return {each.generation: each for each in list_generations(connection)}.get(name)


def state(database: Database, name: str) -> str | None:
    found = generation(database, name)
    return found.state if found else None


def fill(database: Database, total: int, *, fanned_out: bool) -> None:
    """Orders 1 to `total` of that amount each, every tenth in euro, with their events, in two statements of SQLite."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {total})"
    currency = "CASE WHEN i % 10 = 0 THEN 'EUR' ELSE 'JPY' END"
    status = "'PUBLISHED', 1, 1" if fanned_out else "'PENDING', NULL, NULL"
    execute(
        database,
        f"INSERT INTO orders (id, sku, qty, amount, currency, placed_at) {numbers} "
        f"SELECT 'order-' || i, 's', 1, i, {currency}, 1 FROM n",
    )
    execute(
        database,
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status, published_at, fanned_out_at) "
        f"{numbers} SELECT 'order-' || i || ':placed', 'order/order-' || i, 1, '{ORDER_PLACED}', "
        f'\'{{"order_id":"order-\' || i || \'","amount":\' || i || \',"currency":"\' || {currency} || \'"}}\', '
        f"{status} FROM n",
    )


# Rows of all generations, and all that decides which one counts: what a refused step must leave as it was.
_SALES = (
    "SELECT * FROM generations ORDER BY generation",
    "SELECT * FROM sales_applied ORDER BY generation, position",
    "SELECT * FROM sales_totals ORDER BY generation, currency",
    "SELECT intake, paused_by, active_generation, epoch FROM control",
    "SELECT * FROM rebuilds ORDER BY rebuild_id",
    "SELECT * FROM rebuild_expected ORDER BY rebuild_id, event_id",
)


def snapshot(database: Database) -> list[list[tuple[Any, ...]]]:
    return [rows(database, statement) for statement in _SALES]


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of what a rebuild must not write beside its own."""
    names = ("orders", "outbox", "deliveries", "jobs", "charges", "shipments", "billing_entries", "mail_messages")
    return {name: sorted(rows(database, f"SELECT * FROM {name}"), key=repr) for name in names}


def execute(database: Database, statement: str) -> None:
    """A hand in the tables."""
    with database.write() as connection:
        connection.exec_driver_sql(statement)


# One step of the saga as one transaction, after the steps before it.
Step = Callable[[Connection, str], Any]
ONE: dict[str, Step] = {
    FIXED: lambda connection, rebuild_id: fix_history(connection, rebuild_id, 11),
    EXPECTED: lambda connection, rebuild_id: expect_chunk(connection, rebuild_id, "", 1000),
    REPLAYED: lambda connection, rebuild_id: replay_chunk(connection, rebuild_id, 0, 1000),
    SEALED: seal,
    CERTIFIED: lambda connection, rebuild_id: store_certificate(connection, rebuild_id, "{}"),
    ACTIVATED: lambda connection, rebuild_id: activate(connection, rebuild_id, 12),
}


def run(database: Database, step: Step, rebuild_id: str) -> Any:
    """What the step comes to, in a transaction of its own."""
    with database.write() as connection:
        return step(connection, rebuild_id)


def applied(database: Database, name: str) -> list[tuple[Any, ...]]:
    """(position, amount) of the generation's rows."""
    return rows(database, f"SELECT position, amount FROM sales_applied WHERE generation = '{name}' ORDER BY position")


def intake(database: Database) -> tuple[str, str | None, str]:
    """Intake's state, who paused it, and the active generation."""
    with database.read() as connection:
        control = read_control(connection)
    return control.intake, control.paused_by, control.active_generation

"""What must hold once a drill is over, judged from the placer's own log and the database.

Nothing here asks the pipeline how it fared: no counter, no status command, no query of a workflow.
"""

import asyncio
import threading
import time
from dataclasses import dataclass, field

from contracts.identifiers import order_aggregate, order_placed_id
from contracts.orders import Order
from intake import Intake
from runs.starts import Runs
from store.audit import audit
from store.clock import now_ms
from store.orders import place_order
from store.outbox import append_event
from tests.faults.receivers import CHANGED, JOURNALS, POISON, table_of
from tests.faults.rig import Rig, seconds_until

RATE = 100  # orders a second
# Seconds that one order may take on a busy machine: its wake has two. What is away comes back only after the placing.
PATIENT = 20.0


@dataclass
class Placement:
    """What was acknowledged: aggregate -> its event ids in order; amount of each order."""

    events: dict[str, list[str]] = field(default_factory=dict)
    amounts: dict[str, int] = field(default_factory=dict)
    unheard: int = 0  # orders placed while nobody could be woken
    longest: float = 0.0  # seconds that one placing took, its wake included


class Placer(threading.Thread):
    """Places orders at a steady rate through Intake, with two more events for every third order."""

    def __init__(self, rig: Rig, prefix: str, count: int, rate: float = RATE) -> None:
        super().__init__(name=f"placer-{prefix}", daemon=True)
        self._rig = rig
        self._prefix = prefix
        self._count = count
        self._rate = rate
        self.placed = Placement()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._place_all())
        except BaseException as error:
            self.error = error

    def finish(self, timeout: float = 120) -> Placement:
        self.join(timeout)
        assert not self.is_alive(), f"placing did not end within {timeout:g} s"
        if self.error is not None:
            raise self.error
        return self.placed

    async def _place_all(self) -> None:
        runs = Runs(await self._rig.connect(), ("billing", "mail", "sales", *JOURNALS))
        intake = Intake(self._rig.database, runs.wake)
        started = time.monotonic()
        for number in range(self._count):
            await asyncio.sleep(started + number / self._rate - time.monotonic())
            order = Order(f"{self._prefix}-{number}", "sku", 1, 100 + number, "JPY")
            before = time.monotonic()
            placed = await asyncio.to_thread(intake.place, order)
            self.placed.events[order_aggregate(order.id)] = [order_placed_id(order.id)]
            self.placed.amounts[order.id] = order.amount
            self.placed.unheard += not await intake.wake_if_cold(placed)
            self.placed.longest = max(self.placed.longest, time.monotonic() - before)
            if number % 3 == 0:
                await asyncio.to_thread(self._change, order.id, 1)
            if number % 3 == 2:  # a while after the order itself
                for step in (2, 3):
                    await asyncio.to_thread(self._change, f"{self._prefix}-{number - 2}", step)

    def _change(self, order_id: str, step: int) -> None:
        event_id = f"{order_id}:changed-{step}"
        with self._rig.database.write() as connection:
            append_event(
                connection,
                event_id=event_id,
                aggregate_id=order_aggregate(order_id),
                event_type=CHANGED,
                payload={"step": step},
            )
        self.placed.events[order_aggregate(order_id)].append(event_id)


def effects(rig: Rig) -> int:
    """How many effects there are at the two journals and at the built-in receivers."""
    tables = (*map(table_of, JOURNALS), "billing_entries", "mail_messages", "sales_applied")
    return rig.number("SELECT " + " + ".join(f"(SELECT count(*) FROM {table})" for table in tables))


def unfinished(rig: Rig) -> int:
    """Events and deliveries that are still on their way."""
    return rig.number(
        "SELECT (SELECT count(*) FROM outbox WHERE status = 'PENDING' OR fanned_out_at IS NULL)"
        " + (SELECT count(*) FROM deliveries WHERE status IN ('pending', 'retrying'))"
    )


def drained(rig: Rig, timeout: float = 120) -> float:
    """Wait until nothing is on its way; how long it took."""
    try:
        return seconds_until(lambda: unfinished(rig) == 0, timeout, "everything is drained")
    except AssertionError as error:
        states = rig.query("SELECT receiver, status, count(*) FROM deliveries GROUP BY 1, 2")
        box = rig.query("SELECT status, fanned_out_at IS NULL, count(*) FROM outbox GROUP BY 1, 2")
        raise AssertionError(f"{error}\noutbox {box}\ndeliveries {states}\n{rig.logs()}") from None


def audited(rig: Rig, *, by_command: bool = False) -> None:
    """The audit finds nothing; `by_command`: the command says so too, with its exit code."""
    with rig.database.read() as connection:
        found = audit(connection)
    assert found.clean, found.breaks
    if by_command:
        document = rig.run("audit", timeout=120)
        assert (document["clean"], document["breaks"]) == (True, [])


def record(rig: Rig, prefix: str, count: int, *, poison: int = 0) -> int:
    """`count` orders at once, as intake writes them, with a later event for each tenth; every `poison`th is poisoned
    and has a later event too. How many events."""
    events = 0
    for first in range(0, count, 200):
        with rig.database.write() as connection:
            for number in range(first, min(first + 200, count)):
                poisoned = bool(poison) and number % poison == poison - 1
                order = Order(f"{prefix}-{number}{POISON if poisoned else ''}", "sku", 1, 100 + number, "JPY")
                place_order(connection, order, now_ms())
                events += 1
                if poisoned or number % 10 == 0:
                    append_event(
                        connection,
                        event_id=f"{order.id}:changed-2",
                        aggregate_id=order_aggregate(order.id),
                        event_type=CHANGED,
                        payload={"step": 2},
                    )
                    events += 1
    return events


def check(rig: Rig, placements: list[Placement]) -> None:
    """Every acknowledged order has one effect at each receiver, in order, and nobody is blamed."""
    events = {a: ids for placed in placements for a, ids in placed.events.items()}
    amounts = {o: amount for placed in placements for o, amount in placed.amounts.items()}
    recorded: dict[str, list[str]] = {}
    for aggregate_id, seq, event_id in rig.query("SELECT aggregate_id, seq, event_id FROM outbox ORDER BY position"):
        if aggregate_id.startswith("order/"):
            recorded.setdefault(aggregate_id, []).append(event_id)
            assert len(recorded[aggregate_id]) == seq, f"{aggregate_id} has a gap before {seq}"
    assert recorded == events, "the outbox holds something else than what was acknowledged"
    for journal in JOURNALS:
        seen: dict[str, list[str]] = {}
        for event_id, aggregate_id in rig.query(f"SELECT event_id, aggregate_id FROM {table_of(journal)} ORDER BY n"):
            seen.setdefault(aggregate_id, []).append(event_id)
        wrong = {a: (ids, seen.get(a)) for a, ids in events.items() if seen.get(a) != ids}
        assert not wrong, f"{journal} saw (expected, seen) {dict(list(wrong.items())[:5])} of {len(wrong)}"
        assert seen.keys() == events.keys()
    for table in ("billing_entries", "mail_messages"):
        orders = [row[0] for row in rig.query(f"SELECT order_id FROM {table}")]
        assert sorted(orders) == sorted(amounts), table
    assert rig.number("SELECT count(*) FROM sales_applied") == len(amounts)
    assert [tuple(row) for row in rig.query("SELECT orders, amount FROM sales_totals")] == [
        (len(amounts), sum(amounts.values()))
    ]
    assert rig.number("SELECT count(*) FROM orders") == len(amounts)
    blamed = rig.query(
        "SELECT receiver, aggregate_id, seq, status, attempts, last_error FROM deliveries"
        " WHERE status <> 'done' OR attempts > 0 OR last_error IS NOT NULL"
    )
    assert not blamed, f"blamed or unfinished: {blamed[:5]} of {len(blamed)}"
    assert not rig.query("SELECT * FROM invalid_entries")
    audited(rig)

"""Any history of orders, failures, redrives, holds and rebuilds ends with live totals = rebuilt totals = a model.

Each seed drives the store's functions as the pipeline does, a transaction at a time in a random order, and a plain
Python model says what must come out. Weighted by hand: drawn evenly, hardly a history came as far as a switch.
"""

import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from contracts.errors import IntakePaused, Refused
from contracts.events import ORDER_PLACED, Event
from contracts.orders import Order
from store.control import resume_intake
from store.dead_letters import DeadFilter, waive
from store.deliveries import (
    claim_runs,
    load_delivery,
    mark_done,
    next_batch,
    next_probe,
    postpone_attempt,
    record_failure,
)
from store.effects import apply_sales, write_mail_messages
from store.engine import Database
from store.fanout import fan_out
from store.generations import begin_drop, drop_chunk
from store.orders import place_order
from store.outbox import append_event, mark_published, pending_events, publish_again, reset_to_pending
from store.rebuild import ROLLBACK, begin_rebuild, forget_expected, running_rebuild
from store.receivers import get_hold, hold_receiver, lock_receiver, register_receiver, release_receiver
from store.redrives import freeze_redrive, take_chunk
from tests.store.rebuilding import (
    ACTIVATED,
    BEGUN,
    REPLAYED,
    STEPS,
    execute,
    fail,
    reach,
    reconcile,
)
from tests.store.scenes import rows, scalar

RECEIVERS = ("sales", "mail", "log")
TOLD = "order-told"
WEIGHTS = (
    {"place": 9, "tell": 4, "flow": 7, "relay": 1, "duplicate": 1, "publish_an_event_again": 1, "lose_redis": 1}
    | {"spread": 1, "take": 10, "retry": 6, "hold": 1, "probe": 4, "redrive": 2, "waive_one": 0.5}
    | {"begin": 2, "go_on": 6, "cancel": 0.7, "resume": 3, "drop": 1}
)


class History:
    """`seen`: receiver -> event ids in the order in which their effects were committed."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = Random(seed)
        self.database = Database(url)
        self.orders: dict[str, Order] = {}
        self.list: list[str] = []  # what is in Redis
        self.seen: dict[str, list[str]] = defaultdict(list)
        self.clock = 100
        self.rebuild_id: str | None = None
        self.step = BEGUN
        self.numbers = 0
        self.met: Counter[str] = Counter()  # what came by
        with self.database.write() as connection:
            for name in RECEIVERS:
                register_receiver(connection, name, [ORDER_PLACED] + [TOLD] * (name == "log"))

    def run(self, steps: int) -> None:
        """So many transactions, each checked, and then the end."""
        names, weights = zip(*WEIGHTS.items(), strict=True)
        done = []
        try:
            for name in self.random.choices(names, weights, k=steps):
                done.append(name)
                getattr(self, name)()
                self.check()
            done.append("settle")
            self.settle()
        except BaseException:
            print("the last steps:", *done[-30:])
            raise
        finally:
            self.database.close()

    def check(self) -> None:
        self.one_generation_is_active_and_every_one_adds_up()
        self.what_is_done_is_there_once()
        self.each_aggregate_came_in_order()

    # --- intake, relay, fan-out

    def place(self) -> None:
        number, amount = self.random.randint(1, 15), self.random.choice([1, 2, 100, 10**12])
        currency = self.random.choice(["JPY", "EUR"])
        order = self.orders.get(f"o {number}") or Order(f"o {number}", "sku", 1, amount, currency)
        paused = scalar(self.database, "SELECT intake FROM control") == "PAUSED"
        try:
            with self.database.write() as connection:
                placed = place_order(connection, order, self.clock)
        except IntakePaused:
            assert paused
            assert order.id not in self.orders
        else:
            assert placed.created == (order.id not in self.orders)
            assert not (paused and placed.created)
            self.orders[order.id] = order

    def tell(self) -> None:
        number = self.random.randint(1, 15)
        self.numbers += 1
        if f"o {number}" in self.orders:
            with self.database.write() as connection:
                append_event(
                    connection,
                    event_id=f"o {number}:told-{self.numbers}",
                    aggregate_id=f"order/o {number}",
                    event_type=TOLD,
                    payload={},
                )

    def relay(self, limit: int = 2) -> None:
        with self.database.write() as connection:
            pending = pending_events(connection, limit)
            mark_published(connection, [position for position, _ in pending], self.clock)
        self.list += [event_id for _, event_id in pending]

    def duplicate(self) -> None:
        self.list += self.list[:1] * 2

    def publish_an_event_again(self) -> None:
        ids = [row[0] for row in rows(self.database, "SELECT event_id FROM outbox ORDER BY position")]
        if ids:
            with self.database.write() as connection:
                publish_again(connection, self.random.choice(ids))

    def lose_redis(self) -> None:
        self.list.clear()
        lost = rows(self.database, "SELECT position FROM outbox WHERE status = 'PUBLISHED' AND fanned_out_at IS NULL")
        with self.database.write() as connection:
            reset_to_pending(connection, [row[0] for row in lost])

    def spread(self, limit: int = 3) -> None:
        with self.database.write() as connection:
            fan_out(connection, [event_id.encode() for event_id in self.list[:limit]], self.clock)
        del self.list[:limit]

    def flow(self) -> None:
        """Relay and fan-out at full speed."""
        self.relay(1000)
        self.spread(1000)

    # --- receivers

    def _effects(self, connection: Any, receiver: str, events: list[Event]) -> None:
        if receiver == "sales":
            apply_sales(connection, events)
        elif receiver == "mail":
            write_mail_messages(connection, events)
        mark_done(connection, receiver, [event.position for event in events])

    def take(self) -> None:
        """A batch of which some fail, for the first or for the last time."""
        bad = {index for index in range(4) if self.random.random() < 0.15}
        self._take(self._receiver(), self.random.randint(1, 6), bad, self.random.random() < 0.4)

    def _receiver(self) -> str:
        return self.random.choice(RECEIVERS)

    def _take(self, receiver: str, limit: int, bad: set[int], last: bool) -> None:
        with self.database.write() as connection:
            lock_receiver(connection, receiver)
            if get_hold(connection, receiver) is not None:
                return
            closed: set[str] = set()
            good = []
            for index, event in enumerate(next_batch(connection, receiver, limit)):
                if event.aggregate_id in closed:
                    continue
                if index in bad:
                    closed.add(event.aggregate_id)
                    self._fail(connection, receiver, event, 1, last)
                else:
                    good.append(event)
            self._effects(connection, receiver, good)
        self.seen[receiver] += [event.event_id for event in good]

    def _fail(self, connection: Any, receiver: str, event: Event, attempts: int, last: bool) -> None:
        record_failure(
            connection,
            receiver,
            event.position,
            attempts=attempts,
            error="bad",
            next_attempt_at=None if last else self.clock,
            now=self.clock,
        )

    def retry(self) -> None:
        self._retry(self._receiver(), self.random.choice(["done", "done", "fails", "dies", "down"]))

    def _retry(self, receiver: str, outcome: str) -> None:
        with self.database.write() as connection:
            claim_runs(connection, receiver, 32, self.clock)
        waiting = rows(
            self.database,
            "SELECT event_id FROM deliveries d JOIN outbox o ON o.position = d.position "
            f"WHERE receiver = '{receiver}' AND d.status = 'retrying' ORDER BY d.position",
        )
        if not waiting:
            return
        with self.database.write() as connection:
            lock_receiver(connection, receiver)
            delivery = load_delivery(connection, receiver, waiting[0][0])
            if outcome == "done":
                self._effects(connection, receiver, [delivery.event])
            elif outcome == "down":
                postpone_attempt(connection, receiver, delivery.event.position, self.clock, "down")
            else:
                dies = outcome == "dies" or delivery.attempts == 4
                self._fail(connection, receiver, delivery.event, delivery.attempts + 1, dies)
        if outcome == "done":
            self.seen[receiver].append(delivery.event.event_id)

    def hold(self) -> None:
        receiver = self._receiver()
        with self.database.write() as connection:
            hold_receiver(connection, receiver, "down", self.clock)

    def probe(self) -> None:
        """The receiver is back, and the one event that it is tried with is taken."""
        self._probe(self._receiver(), self.random.randint(0, 20))

    def _probe(self, receiver: str, after: int) -> None:
        with self.database.write() as connection:
            lock_receiver(connection, receiver)
            if get_hold(connection, receiver) is None:
                return
            events = list(next_probe(connection, receiver, after))
            self._effects(connection, receiver, events)
            release_receiver(connection, receiver)
        self.seen[receiver] += [event.event_id for event in events]

    # --- dead letters

    def redrive(self) -> None:
        self._redrive(self._receiver(), self.random.randint(1, 3))

    def _redrive(self, receiver: str, limit: int) -> None:
        self.numbers += 1
        request = f"request-{self.numbers}"
        with self.database.write() as connection:
            freeze_redrive(connection, request, DeadFilter(receiver), self.clock, self.clock)
        for _ in range(2):  # twice: the second time finds it as it is, or goes on
            with self.database.write() as connection:
                self.met["redriven"] += take_chunk(connection, request, limit, self.clock).items

    def waive_one(self) -> None:
        receiver = self._receiver()
        dead = rows(
            self.database,
            "SELECT event_id FROM deliveries d JOIN outbox o ON o.position = d.position "
            f"WHERE receiver = '{receiver}' AND d.status = 'dead' ORDER BY d.position",
        )
        if dead:
            self.met["waived"] += 1
            with self.database.write() as connection:
                waive(connection, receiver, dead[0][0], "will not do", "me", self.clock)

    # --- generations

    def begin(self) -> None:
        self._begin(self.random.choice(["rebuild", "rebuild", ROLLBACK]), self.random.random() < 0.5)

    def _begin(self, kind: str, resume: bool) -> None:
        self.numbers += 1
        try:
            with self.database.write() as connection:
                begun = begin_rebuild(
                    connection, f"run-{self.numbers}", kind=kind, target=None, resume=resume, now=self.clock
                )
        except Refused:
            assert self.rebuild_id is not None or kind == ROLLBACK
            return
        assert self.rebuild_id is None
        self.rebuild_id, self.step = begun.rebuild_id, BEGUN

    def go_on(self) -> None:
        until, chunk = self.random.choice([*STEPS[1:], ACTIVATED]), self.random.randint(1, 6)
        if self.rebuild_id is None:
            return
        undrained = scalar(
            self.database,
            "SELECT count(*) FROM outbox WHERE event_type = 'order-placed' "
            "AND (status = 'PENDING' OR fanned_out_at IS NULL)",
        )
        if self.step == BEGUN and undrained:
            return
        if STEPS.index(until) <= STEPS.index(self.step):
            return
        reach(self.database, self.rebuild_id, until, chunk=chunk)
        self.step = until
        if until == ACTIVATED:
            self.met[self.rebuild_id.split("-")[0] + " switched"] += 1
            self._over()

    def cancel(self) -> None:
        if self.rebuild_id is None:
            return
        before = scalar(self.database, "SELECT active_generation FROM control")
        assert fail(self.database, self.rebuild_id).state == "FAILED"
        assert scalar(self.database, "SELECT active_generation FROM control") == before
        self.met[f"cancelled when {self.step}"] += 1
        self._over()

    def _over(self) -> None:
        assert self.rebuild_id is not None
        with self.database.write() as connection:
            forget_expected(connection, self.rebuild_id, 1000)
        self.rebuild_id = None

    def resume(self) -> None:
        try:
            with self.database.write() as connection:
                resume_intake(connection)
        except Refused:
            assert self.rebuild_id is not None

    def drop(self) -> None:
        useless = rows(self.database, "SELECT generation FROM generations WHERE state = 'FAILED' ORDER BY generation")
        if useless:
            with self.database.write() as connection:
                begin_drop(connection, useless[0][0])
                drop_chunk(connection, useless[0][0], 1000)

    # --- what holds at every instant

    def one_generation_is_active_and_every_one_adds_up(self) -> None:
        active = rows(self.database, "SELECT generation FROM generations WHERE state = 'ACTIVE'")
        assert active == rows(self.database, "SELECT active_generation FROM control")
        assert rows(
            self.database,
            "SELECT generation, currency, orders, amount FROM sales_totals ORDER BY generation, currency",
        ) == rows(
            self.database,
            "SELECT generation, currency, count(*), CAST(sum(amount) AS BIGINT) FROM sales_applied "
            "GROUP BY generation, currency ORDER BY generation, currency",
        )

    def what_is_done_is_there_once(self) -> None:
        done: dict[str, list[str]] = defaultdict(list)
        for receiver, event_id in rows(
            self.database,
            "SELECT receiver, event_id FROM deliveries d JOIN outbox o ON o.position = d.position "
            "WHERE d.status = 'done'",
        ):
            done[receiver].append(event_id)
        assert {name: sorted(ids) for name, ids in self.seen.items() if ids} == {
            name: sorted(ids) for name, ids in done.items()
        }
        assert scalar(self.database, "SELECT count(*) FROM mail_messages") == len(done["mail"])
        lacking = rows(
            self.database,
            "SELECT d.position FROM deliveries d WHERE d.receiver = 'sales' AND d.status = 'done' AND NOT EXISTS "
            "(SELECT 1 FROM sales_applied a WHERE a.position = d.position "
            "AND a.generation = (SELECT active_generation FROM control))",
        )
        assert lacking == []

    def each_aggregate_came_in_order(self) -> None:
        sequence = dict(rows(self.database, "SELECT event_id, seq FROM outbox"))  # type: ignore[arg-type]
        for ids in self.seen.values():
            last: dict[str, int] = {}
            for event_id in ids:
                aggregate = event_id.rsplit(":", 1)[0]
                assert sequence[event_id] > last.get(aggregate, 0)
                last[aggregate] = sequence[event_id]

    # --- the end

    def settle(self) -> None:
        """All faults are over: everything drains, and one more rebuild is equal to what came about live."""
        if self.rebuild_id is not None:
            self.cancel()
        self.resume()
        for receiver in RECEIVERS:
            self._probe(receiver, 0)
            self._redrive(receiver, 1000)
        while scalar(self.database, "SELECT count(*) FROM outbox WHERE status = 'PENDING' OR fanned_out_at IS NULL"):
            self.lose_redis()
            self.relay(1000)
            self.spread(1000)
        for receiver in RECEIVERS:
            open_states = f"receiver = '{receiver}' AND status IN ('pending', 'retrying')"
            while scalar(self.database, f"SELECT count(*) FROM deliveries WHERE {open_states}"):
                self._retry(receiver, "done")
                self._take(receiver, 1000, set(), False)
        assert scalar(self.database, "SELECT count(*) FROM deliveries WHERE status NOT IN ('done', 'waived')") == 0
        self.each_aggregate_came_in_order()
        self.what_is_done_is_there_once()
        live = self._held()
        missing = self.orders.keys() - live.keys()
        waived = {
            row[0].rsplit(":", 1)[0]
            for row in rows(
                self.database,
                "SELECT event_id FROM deliveries d JOIN outbox o ON o.position = d.position "
                "WHERE d.status = 'waived' AND receiver = 'sales'",
            )
        }
        # A waived sale counts once a rebuild has put it in; whatever else was placed is there.
        assert missing <= waived
        assert live == {name: self._value(name) for name in self.orders if name not in missing}
        self._begin("rebuild", True)
        assert self.rebuild_id is not None
        reach(self.database, self.rebuild_id, REPLAYED, chunk=3)
        assert reconcile(self.database, self.rebuild_id, limit=2).problems() == []
        reach(self.database, self.rebuild_id, ACTIVATED)
        assert self._held() == {name: self._value(name) for name in self.orders}
        with self.database.read() as connection:
            assert running_rebuild(connection) is None
        self.one_generation_is_active_and_every_one_adds_up()

    def _value(self, name: str) -> tuple[int, str]:
        return self.orders[name].amount, self.orders[name].currency

    def _held(self) -> dict[str, tuple[int, str]]:
        """Order id -> what the active generation counts for it."""
        return {
            event_id.rsplit(":", 1)[0]: (amount, currency)
            for event_id, amount, currency in rows(
                self.database,
                "SELECT event_id, a.amount, a.currency FROM sales_applied a JOIN outbox o ON o.position = a.position "
                "WHERE generation = (SELECT active_generation FROM control)",
            )
        }


SEEDS = 12


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """What came by in all histories. Random as they are, they must have come by what this test is about."""
    met: Counter[str] = Counter()
    yield met
    if met["histories"] == SEEDS:
        for what in ("rebuild switched", "rollback switched", "cancelled", "waived", "redriven"):
            assert any(name.startswith(what) for name in +met), (what, met)


@pytest.fixture
def fast_url(sqlite_template: Path) -> Iterator[str]:
    # Where the machine has memory for files: syncing is not what is tested here.
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="history-", dir=fast) as folder:
        shutil.copy(sqlite_template, Path(folder) / "saisei.db")
        yield f"sqlite:///{folder}/saisei.db"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_history_on_sqlite(fast_url: str, seed: int, met: Counter[str]) -> None:
    history = History(fast_url, seed)
    history.run(200)
    met.update(history.met)
    met["histories"] += 1


@pytest.mark.parametrize("seed", [100, 101])
def test_any_history_on_postgresql(postgres_url: str, seed: int) -> None:
    History(postgres_url, seed).run(80)


def test_a_loss_is_noticed(fast_url: str) -> None:
    """The checks themselves are tried: an effect that vanishes must not pass."""
    history = History(fast_url, 0)
    execute(
        history.database,
        "CREATE TRIGGER lose AFTER INSERT ON sales_applied WHEN new.position = 3 BEGIN "
        "DELETE FROM sales_applied WHERE position = 3; END",
    )
    with pytest.raises(AssertionError):
        history.run(200)

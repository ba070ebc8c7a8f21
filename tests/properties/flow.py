"""What may happen to orders on their way: at intake, in the list, at a receiver. One rule a step."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from temporalio.exceptions import ApplicationError

from contracts.errors import Conflict, IntakePaused, StoreBusy
from contracts.messages import DeliveryInput
from contracts.orders import Order
from store.dead_letters import DeadFilter
from store.faults import ERROR, OUTAGE, clear_fault, set_fault
from store.orders import place_order
from store.outbox import append_event, publish_again
from tests.properties.checks import Seen, look
from tests.properties.dying import MOODS
from tests.properties.model import PLACED, TOLD, Model
from tests.properties.strategies import Death, deaths, indexes, junk, orders, sizes
from tests.properties.world import LATE, World

T = TypeVar("T")

RECEIVERS = ("billing", "mail", "sales", "log", LATE)
receivers = st.sampled_from(RECEIVERS)
moods = st.sampled_from([*sorted(MOODS), "bad", "rejected"])
seldom = st.sampled_from([False, False, False, True])


@dataclass(frozen=True)
class Visit:
    """A receiver takes some batches, after all that waits has come to it if there is a `flow`; it fails for some of
    what waits there, and goes on to; some runs of failing events try again."""

    flow: bool
    size: int
    batches: int
    failing: list[tuple[int, str]]
    retries: int
    death: Death | None


_failing = st.tuples(indexes, moods)
visits = st.builds(
    Visit,
    flow=seldom.map(lambda value: not value),
    size=sizes,
    batches=st.integers(1, 3),
    failing=st.lists(_failing, max_size=1) | st.lists(_failing, min_size=1, max_size=4),
    retries=st.sampled_from([0, 0, 1, 4, 8]),
    death=deaths,
)


def pick(things: Sequence[T], index: int) -> T:
    """One of them, counted round: what there is differs from what was drawn."""
    return things[index % len(things)]


class Flow(RuleBasedStateMachine):
    """A shop under a model. Each rule is what one person, one activity or one accident does."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.model = Model()
        self.told = self.rebuilds = self.steps = 0
        self.requests: dict[str, DeadFilter] = {}
        self.rebuild_id: str | None = None
        self.phase = 0  # the next one of the rebuild
        self.resumes = self.switched = False  # whether it opens intake, and whether its switch is made
        self.revives = self.switches = False  # what the step at hand may do
        world.begin()
        for name in ("billing", "mail", "sales", "log"):
            self.model.subscribe(name, PLACED)
        self.seen: Seen = look(world)

    # --- orders, and their way to the receivers

    @initialize(
        first=st.lists(orders, min_size=1, max_size=6, unique_by=lambda order: order.id),
        told=st.lists(indexes, max_size=4),
        both=st.sampled_from([True, True, False]),
    )
    def opens(self, first: list[Order], told: list[int], both: bool) -> None:
        """Some orders, some of them with later events; `both`: the log takes those too, from the first on."""
        if both:
            self.subscribe("log", (PLACED, TOLD))
        self.place(first)
        for index in told:
            self.tell(index, 1, False)

    @rule(more=st.lists(orders, min_size=1, max_size=4))
    def place(self, more: list[Order]) -> None:
        for order in more:
            known = self.model.orders.get(order.id)
            try:
                placed = self.world.transaction(lambda connection, order=order: place_order(connection, order, 1))
            except Conflict:
                assert known not in (None, order)
            except IntakePaused:
                assert self.model.paused
                assert known is None
            else:
                assert placed.created == (known is None)
                assert known in (None, order)
                if placed.created:
                    assert not self.model.paused
                    self.model.place(order)

    @precondition(lambda self: self.model.orders)
    @rule(index=indexes, times=st.integers(1, 3), again=st.booleans())
    def tell(self, index: int, times: int, again: bool) -> None:
        order_id = pick(list(self.model.orders), index)
        for _ in range(times):
            self.told += 1
            event_id = f"{order_id}:told-{self.told}"
            assert self._append(order_id, event_id, {})
            self.model.tell(order_id, event_id)
        if again:
            assert not self._append(order_id, event_id, {})
            with suppress(Conflict):
                self._append(order_id, event_id, {"other": 1})
                raise AssertionError("other content under the same id was taken")

    def _append(self, order_id: str, event_id: str, more: dict[str, int]) -> bool:
        return self.world.transaction(
            lambda connection: append_event(
                connection,
                event_id=event_id,
                aggregate_id=f"order/{order_id}",
                event_type=TOLD,
                payload={"order_id": order_id, **more},
            )
        )[1]

    @precondition(lambda self: self.model.facts)
    @rule(relay=st.booleans(), size=sizes, death=deaths)
    def step(self, relay: bool, size: int, death: Death | None) -> None:
        """One batch into the list, or out of it."""
        (self.world.push if relay else self.world.spread)(size, death)

    # A rule for each receiver: hypothesis leaves half of all rules out of an example, and seldom all of these.
    @precondition(lambda self: self.model.facts)
    @rule(visit=visits)
    def billing_takes(self, visit: Visit) -> None:
        self._visit("billing", visit)

    @precondition(lambda self: self.model.facts)
    @rule(visit=visits)
    def mail_takes(self, visit: Visit) -> None:
        self._visit("mail", visit)

    @precondition(lambda self: self.model.facts)
    @rule(visit=visits)
    def sales_takes(self, visit: Visit) -> None:
        self._visit("sales", visit)

    @precondition(lambda self: self.model.facts)
    @rule(visit=visits)
    def log_takes(self, visit: Visit) -> None:
        self._visit("log", visit)

    @precondition(lambda self: LATE in self.world.here)
    @rule(visit=visits)
    def late_takes(self, visit: Visit) -> None:
        self._visit(LATE, visit)

    def _visit(self, name: str, visit: Visit) -> None:
        if visit.flow:
            self.world.flow()
        waiting = [
            event for receiver, event in sorted(look(self.world, audited=False).in_state("pending")) if receiver == name
        ]
        if waiting:
            self.world.witnesses[name].moods.update((pick(waiting, index), mood) for index, mood in visit.failing)
        for _ in range(visit.batches):
            self._take(name, visit.size, visit.death)
        for index in range(visit.retries):
            if self.world.open_runs:
                self._attempt(pick(self.world.open_runs, index))

    def _take(self, receiver: str, size: int, death: Death | None = None) -> int:
        try:
            return self.world.take(receiver, size, death) or 0
        except StoreBusy:  # an activity that failed, and is tried again
            self.world.met["our database was busy"] += 1
            return 0

    # --- what happens to the list

    @rule(entries=st.integers(1, 5) | st.just(1000), index=indexes, found=st.booleans())
    def lose_the_list(self, entries: int, index: int, found: bool) -> None:
        """Some of what waits in it, or all; what is left goes on, past what came before it."""
        if self.model.orders:
            self.tell(index, 2, False)
        self.world.push(1000)
        self.world.lose(entries)
        self.world.spread(1000)
        if found:
            self.recover()

    def recover(self) -> None:
        """By hand, or by the look once what is missing is late."""
        self.world.met["recovered"] += self.world.recover()

    @precondition(lambda self: self.model.facts)
    @rule(index=indexes, times=st.integers(1, 3), again=st.booleans(), entries=st.lists(junk, max_size=3))
    def noise(self, index: int, times: int, again: bool, entries: list[bytes]) -> None:
        """Entries that nobody asked for: duplicates, an event that is published again, and junk."""
        event_id = pick(self.model.facts, index).event_id
        self.world.put(*[event_id.encode()] * times)
        if again:
            self.world.transaction(lambda connection: publish_again(connection, event_id))
        if entries:
            known = {fact.event_id.encode() for fact in self.model.facts}
            self.world.put(*entries)
            self.world.met["junk"] += len(set(entries) - known)

    # --- receivers

    @rule(receiver=receivers, mode=st.sampled_from([ERROR, OUTAGE, None, None]))
    def switch(self, receiver: str, mode: str | None) -> None:
        """A drill's fault on or off; off, the receiver is also right again about the events that it failed for."""
        if mode is None:
            self.world.witnesses[receiver].moods.clear()
            self.world.transaction(lambda connection: clear_fault(connection, receiver))
        else:
            self.world.transaction(lambda connection: set_fault(connection, receiver, mode))

    @rule(index=indexes, times=st.integers(1, 3))
    def outage(self, index: int, times: int) -> None:
        """The receiver is away for a while: nothing is spent, whatever is tried."""
        receiver = pick(self.world.here, index)
        self.switch(receiver, OUTAGE)
        before = look(self.world, audited=False)
        for _ in range(times):
            self._take(receiver, 3)
        after = look(self.world, audited=False)
        assert (after.attempts, after.states) == (before.attempts, before.states)
        self.world.met["outage"] += bool(before.in_state("pending"))
        self.switch(receiver, None)

    @precondition(lambda self: self.world.open_runs)
    @rule(index=indexes, times=st.sampled_from([1, 2, 5, 12]), death=deaths)
    def retry(self, index: int, times: int, death: Death | None) -> None:
        """Runs of failing events try, once or until all is settled."""
        for _ in range(times):
            if self.world.open_runs:
                self._attempt(pick(self.world.open_runs, index), death)
                index += 1

    def _attempt(self, run: DeliveryInput, death: Death | None = None) -> None:
        try:
            result = self.world.attempt(run, death)
        except ApplicationError:
            self.world.met["failed again"] += 1
        except StoreBusy:
            self.world.met["our database was busy"] += 1
        else:
            self.world.met[f"settled: {result.state}" if result else "an answer was lost"] += 1

    @precondition(lambda self: self.seen.attempts)
    @rule(index=indexes, fail=st.booleans())
    def deliver_by_hand(self, index: int, fail: bool) -> None:
        receiver, event_id = pick(sorted(self.seen.attempts), index)
        message = DeliveryInput(receiver, event_id, "", manual=True, fail=fail)
        before = look(self.world, audited=False)
        try:
            self.world.do(lambda: self.world.delivering.deliver_by_hand(message))
        except (ApplicationError, StoreBusy):
            after = look(self.world, audited=False)
            assert (after.attempts, after.states) == (before.attempts, before.states)
        else:
            self.world.met["by hand"] += before.states[receiver][event_id] != "done"

    @rule(all_of_them=seldom)
    def lose_runs(self, all_of_them: bool) -> None:
        """Temporal comes back without its runs, or the look finds one that is overdue."""
        if all_of_them:
            self.world.lose_temporal()
        else:
            self.world.start_runs()

    @rule(receiver=st.sampled_from(["log", LATE]), types=st.sampled_from([(PLACED,), (TOLD,), (PLACED, TOLD)]))
    def subscribe(self, receiver: str, types: tuple[str, ...]) -> None:
        """A new receiver, or a new type for an old one: from here on, not from the beginning."""
        self.world.subscribe(receiver, *types)
        self.model.subscribe(receiver, *types)

"""Any history, step by step: what people and failures may do to a shop, in any order; what holds, and how it ends."""

import sys
from typing import TypeVar

import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from temporalio.exceptions import ApplicationError

from contracts.errors import Conflict, Refused
from contracts.messages import RebuildInput
from contracts.orders import Order
from store.control import pause_by_hand, resume_intake
from store.dead_letters import DeadFilter, waive
from store.generations import begin_drop, drop_chunk
from store.rebuild import REBUILD, ROLLBACK, Rebuild, get_rebuild
from store.redrives import RUNNING, Redrive, cancel_redrive, freeze_redrive, get_redrive
from store.schema import generations
from tests.properties.checks import check, check_change, check_end, look
from tests.properties.flow import RECEIVERS, Flow, pick, seldom
from tests.properties.strategies import Death, deaths, indexes, orders, sizes

T = TypeVar("T")

AUDIT_EVERY = 4  # steps; it is the dearest of all checks, and what breaks an invariant does not mend by itself
PHASES = ("await_drained", "replay", "reconcile", "seal", "certify", "activate", "forget_expected")
kinds = st.sampled_from([REBUILD, REBUILD, ROLLBACK])
filters = st.builds(DeadFilter, receiver=st.none() | st.sampled_from(RECEIVERS[:4]))


class Shop(Flow):
    """The flow, with its dead letters, its intake and its generations."""

    # --- dead letters

    @precondition(lambda self: self.requests or self.seen.in_state("dead"))
    @rule(number=st.integers(1, 4), wanted=filters, chunks=st.integers(0, 3), size=sizes, stop=seldom, death=deaths)
    def redrive(self, number: int, wanted: DeadFilter, chunks: int, size: int, stop: bool, death: Death | None) -> None:
        """Asked for, and carried on for some chunks. A request id twice is one redrive."""
        request, now = f"request-{number}", self.world.clock.ms
        first = self.requests.get(request)
        try:
            redrive, made = self.world.transaction(
                lambda connection: freeze_redrive(connection, request, wanted, now, now)
            )
        except Conflict:
            assert first not in (None, wanted)
        else:
            assert first in (None, wanted)
            assert made == (first is None)
            if made:
                dead = {key for key in self.seen.in_state("dead") if wanted.receiver in (None, key[0])}
                assert redrive.total == len(dead)
            self.requests[request] = wanted
        self.revives = True
        for _ in range(chunks):
            before = self._redrive(request)
            self.world.redrive(request, size, death)
            after = self._redrive(request)
            assert after.left <= before.left
            assert after.state == "CANCELLED" or (after.state == RUNNING) == (after.left > 0)
            self.world.met["redriven"] += after.taken - before.taken
        if stop:
            self.world.transaction(lambda connection: cancel_redrive(connection, request, "stopped", 5))

    def _redrive(self, request: str) -> Redrive:
        with self.world.database.read() as connection:
            return get_redrive(connection, request)

    @precondition(lambda self: self.seen.in_state("dead", "waived"))
    @rule(index=indexes, any_state=seldom, frozen=st.booleans())
    def waive(self, index: int, any_state: bool, frozen: bool) -> None:
        """A person lets a dead letter go; nothing else can be let go. `frozen`: a redrive asked for it just before,
        and finds it gone."""
        self.revives = True
        known = sorted(self.seen.attempts if any_state else self.seen.in_state("dead"))
        if not known:
            return
        receiver, event_id = pick(known, index)
        state = self.seen.states[receiver][event_id]
        request, now = f"too late, {self.steps}", self.world.clock.ms
        if frozen:
            self.world.transaction(lambda connection: freeze_redrive(connection, request, DeadFilter(), now, now))
        try:
            self.world.transaction(lambda connection: waive(connection, receiver, event_id, "will not do", "me", 5))
        except Refused:
            assert state not in ("dead", "waived")
        else:
            assert state in ("dead", "waived")
            self.world.met["waived"] += state == "dead"
            if frozen:
                self.world.redrive(request, 1000)
                assert look(self.world, audited=False).states[receiver][event_id] == "waived"

    # --- intake and generations

    @rule(open_it=st.booleans())
    def intake(self, open_it: bool) -> None:
        """Paused or opened by hand."""
        if not open_it:
            changed = self.world.transaction(lambda connection: pause_by_hand(connection, "me"))
            assert changed == (not self.model.paused)
            self.model.paused = True
            return
        try:
            self.world.transaction(resume_intake)
        except Refused:
            assert self.running
        else:
            assert not self.running
            self.model.paused = False

    @rule(kind=kinds, resume=st.booleans(), death=deaths, before=st.lists(orders, max_size=2))
    def asks_for_rebuild(self, kind: str, resume: bool, death: Death | None, before: list[Order]) -> None:
        """Right behind some orders, for which it has to wait."""
        self.place(before)
        self.begin(kind, resume, death)
        if self.running:
            self._go_on(1000)

    def begin(self, kind: str, resume: bool, death: Death | None) -> None:
        """Asked for twice by one run, it is one rebuild."""
        self.rebuilds += 1
        run_id, message = f"run-{self.rebuilds}", RebuildInput(kind=kind, resume=resume)
        begun, refused = None, None
        try:
            first = self.world.begin_rebuild(run_id, message, death)
            begun = self.world.begin_rebuild(run_id, message)
        except ApplicationError as error:
            refused = error.type
        if begun is None:
            assert refused == "Refused"
            assert self.running or (kind == ROLLBACK and "RETIRED" not in self._generations().values())
            return
        assert first in (None, begun)
        assert not self.running
        self.rebuild_id, self.phase, self.resumes, self.switched = begun.rebuild_id, 0, resume, False
        self.model.paused = True

    @property
    def running(self) -> bool:
        """Whether a rebuild is on its way to a switch."""
        return self.rebuild_id is not None and not self.switched

    @precondition(lambda self: self.rebuild_id)
    @rule(phases=st.integers(1, len(PHASES)), width=sizes, death=deaths)
    def go_on(self, phases: int, width: int, death: Death | None) -> None:
        """The next phases; one at which the worker dies is begun again."""
        for _ in range(phases):
            if not self._go_on(width, death):
                return

    @precondition(lambda self: self.rebuild_id or self.model.orders)
    @rule(kind=kinds, resume=st.booleans(), width=sizes, death=deaths)
    def rebuild(self, kind: str, resume: bool, width: int, death: Death | None) -> None:
        """To the end, or to the first phase that cannot go on."""
        if self.rebuild_id is None:
            self.begin(kind, resume, None)
        self.world.flow()
        self.recover()
        self.world.flow()
        while self.rebuild_id is not None and self._go_on(width, death):
            death = None

    def _go_on(self, width: int, death: Death | None = None) -> bool:
        """Whether the next phase is done."""
        if self.rebuild_id is None:
            return False
        self.switches = True
        name = PHASES[self.phase]
        self.world.met[f"rebuild at {name}"] += 1
        report, problem = None, None
        try:
            report = self.world.phase(name, self.rebuild_id, width, death)
        except ApplicationError as error:
            problem = error.type
        if problem is not None:
            assert name == "await_drained"
            if problem == "NotDrained":
                assert not self.world.at_rest
            else:  # the generation that it was to go back to was dropped meanwhile
                assert problem == "Refused"
                assert self._generations().get(self._rebuild().generation) in (None, "FAILED")
                self.cancel(None)
            return False
        if report is None and name != "forget_expected":
            return False
        if name == "await_drained":
            assert look(self.world, audited=False).states["sales"].keys() == set(self.model.owed("sales"))
        if name in ("reconcile", "certify"):
            assert report.problems == []
            assert report.count == len(self.model.orders)
        self.phase += 1
        if self.phase == len(PHASES):
            self._over()
        return True

    @precondition(lambda self: self.rebuild_id)
    @rule(death=deaths)
    def cancel(self, death: Death | None) -> None:
        """A rebuild that ends early; where its switch was made already, that stands."""
        assert self.rebuild_id is not None
        self.switches = True
        for each in (death, None):  # again, if the first was not lived to tell
            report = self.world.phase("fail_rebuild", self.rebuild_id, 1, each)
        assert report is not None
        self.world.met[f"cancelled at {PHASES[self.phase]}: {report.state}"] += 1
        self._over()

    def _over(self) -> None:
        """The rebuild has ended, one way or the other: the database says which."""
        ended = self._rebuild()
        assert ended.state == ("COMPLETED" if self.switched or self.phase == len(PHASES) else "FAILED")
        self.world.met[f"{ended.kind} {ended.state}"] += 1
        self.rebuild_id = None

    def _rebuild(self) -> Rebuild:
        assert self.rebuild_id is not None
        with self.world.database.read() as connection:
            return get_rebuild(connection, self.rebuild_id)

    def _generations(self) -> dict[str, str]:
        with self.world.database.read() as connection:
            columns = (generations.c.generation, generations.c.state)
            return dict(connection.execute(sa.select(*columns).order_by(generations.c.created_at)).all())

    @rule(index=indexes, chunk=sizes, chunks=st.integers(0, 5))
    def drop(self, index: int, chunk: int, chunks: int) -> None:
        """A generation that is of use no more, some of it or all."""
        name, state = pick(list(self._generations().items()), index)
        try:
            self.world.transaction(lambda connection: begin_drop(connection, name))
        except Refused:
            assert state not in ("RETIRED", "FAILED")
            return
        assert state in ("RETIRED", "FAILED")
        for _ in range(chunks):
            self.world.transaction(lambda connection: drop_chunk(connection, name, chunk))
        self.world.met["dropped"] += 1

    # By weight: drawn evenly, hardly a history comes as far as a dead letter that is redriven, or a second switch.
    sales_takes_2 = Flow.sales_takes
    log_takes_2 = Flow.log_takes
    tell_2 = Flow.tell
    redrive_2 = redrive_3 = redrive
    waive_2 = waive
    rebuild_2 = rebuild

    # --- what holds

    @invariant()
    def holds(self) -> None:
        self.steps += 1
        before, self.seen = self.seen, look(self.world, audited=self.steps % AUDIT_EVERY == 0)
        if self.seen.active != before.active:
            assert self.switches
            self.switched = True
            self.model.switched()
            self.model.paused = not self.resumes
        check(self.seen, self.model)
        check_change(before, self.seen, revives=self.revives, switches=self.switches)
        self.revives = self.switches = False

    def teardown(self) -> None:
        """The faults are over: everything drains, and one more rebuild comes to what is there live."""
        if sys.exc_info()[0] is None:  # else it is the failed step that is told of
            self.settle()

    def settle(self) -> None:
        """Nobody helps but with what was dead: whoever redrives it has put right why it died."""
        world = self.world
        world.restart()
        for receiver in RECEIVERS:
            self.switch(receiver, None)
        world.flow()
        world.recover()
        world.flow()
        assert world.at_rest
        while self.rebuild_id is not None:
            self._go_on(1000)
        self.holds()
        self.intake(True)
        for turn in range(10):
            self._drain()
            if not self._unsettled(turn):
                break
        self._hold_at_last()
        live = self.seen.generations.get(self.seen.active, {})
        waived = {event.removesuffix(":placed") for name, event in self.seen.in_state("waived") if name == "sales"}
        assert live.keys() >= self.model.orders.keys() - waived
        self.begin(REBUILD, True, None)
        while self.rebuild_id is not None:
            assert self._go_on(3)
        self._hold_at_last()
        rebuilt = self.seen.generations.get(self.seen.active, {})
        assert {name: rebuilt[name] for name in live} == live
        assert self.seen.totals.get(self.seen.active, {}) == self.model.totals(self.model.orders)

    def _hold_at_last(self) -> None:
        self.holds()
        check_end(look(self.world), self.model)

    def _drain(self) -> None:
        self.world.start_runs()
        for receiver in self.world.here:
            while self._take(receiver, 1000):
                pass
        while self.world.open_runs:
            self._attempt(self.world.open_runs[0])

    def _unsettled(self, turn: int) -> bool:
        """Whether something is left; what is dead is pending again."""
        self.holds()
        self.revives = True
        if self.seen.in_state("dead"):
            request, now = f"the last, {turn}", self.world.clock.ms
            self.world.transaction(lambda connection: freeze_redrive(connection, request, DeadFilter(), now, now))
            self.world.redrive(request, 1000)
        return bool(self.seen.in_state("dead", "pending", "retrying"))

"""Outage and recovery: a receiver fails, its totals are rebuilt from the history while nobody orders, proved equal and
switched to, and the dead letters that are redriven afterwards change nothing.

Servers, worker and HTTP API are real processes of a scratch stack. What each step shows was read in one snapshot; the
verdict compares it with what the numbers of the orders say it must be.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection
from temporalio.client import Client
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.runtime import Runtime, TelemetryConfig

import embedded
from commands.api_client import ApiClient
from commands.orders import numbered_order
from commands.stack import api_child, worker_child
from contracts.counts import counted
from contracts.errors import Refused
from contracts.identifiers import order_placed_id
from contracts.messages import RebuildInput
from contracts.names import FAN_OUT_ID, PROCEED_SIGNAL
from labs.recovery_state import Plan, State, Step, amount_of, differences, read_state
from labs.scratch import Scratch, process_env
from labs.verdict import LabFailed, Verdict
from pipeline import event_list
from pipeline.event_list import EventList
from receivers.registry import by_name
from runs.starts import Runs
from store.audit import audit
from store.clock import now_ms
from store.control import resume_intake
from store.dead_letters import DeadFilter, dead_letters
from store.deliveries import DONE, PENDING, RETRYING
from store.engine import Database, sqlite_url
from store.faults import ERROR, clear_fault, set_fault
from store.generations import ACTIVE, BUILDING, RETIRED, list_generations
from store.rebuild import COMPLETED, Rebuild, last_rebuild
from store.redrives import freeze_redrive
from store.schema import INITIAL, OPEN, PAUSED
from store.status import count_orders, outbox_status, receiver_status

T = TypeVar("T")

_SALES, _JPY = "sales", "JPY"
_DUPLICATES = 3
_ATTEMPTS = 5
# Short waits, so that the whole is over soon; the number of attempts is the usual one.
_WAITS = {"attempts": _ATTEMPTS, "backoff": 0.05, "idle": 0.2}
_PATIENCE = 60.0  # seconds for one step, and a little for each order
_EVERY = 0.02
_LOOK_AFTER_MS = 10_000
_STARTER = Path(__file__).resolve().parent.parent / "starter.py"


def children() -> list[embedded.Child]:
    """The processes of the walk-through beside the servers."""
    env = process_env(**_WAITS)
    return [worker_child(env), api_child(embedded.any_free(), env)]


async def walk(plan: Plan, scratch: Scratch, tell: Callable[[Step], None]) -> Verdict:
    """Take all steps on `scratch`, which was started with `children()`; each goes to `tell` as it is done.

    Raises LabFailed when a step comes to no end.
    """
    database = Database(sqlite_url(scratch.home / "saisei.db"))
    events = EventList(event_list.connect(scratch.redis_url))
    address, url = scratch.stack.temporal_address, scratch.stack.url("api")
    assert address is not None
    assert url is not None
    try:
        # The core's own log goes to stdout, where only the walk-through's lines belong.
        client = await Client.connect(address, runtime=Runtime(telemetry=TelemetryConfig(logging=None)))
        with ApiClient(url) as api:
            steps = _Steps(plan, scratch, database, events, Runs(client, tuple(by_name())), api, url, tell)
            await steps.outage()
            await steps.rebuild()
            await steps.after()
            return steps.verdict
    finally:
        events.close()
        database.close()


@dataclass
class _Steps:
    plan: Plan
    scratch: Scratch
    database: Database
    events: EventList
    runs: Runs
    api: ApiClient
    url: str
    tell: Callable[[Step], None]
    verdict: Verdict = field(default_factory=lambda: Verdict("recovery"))

    async def outage(self) -> None:
        """Orders, duplicates, and a receiver that fails while the others go on."""
        plan = self.plan
        state = self._expect(0, sold=0)
        await self._step("start", "an empty shop", state)

        await self._place(1, plan.first)
        state = self._expect(plan.first, sold=plan.first)
        await self._step("orders", f"{counted(plan.first, 'order')} through the HTTP API", state)

        await asyncio.to_thread(self.events.push, [order_placed_id("order-1")] * _DUPLICATES)
        await self.runs.wake([FAN_OUT_ID])
        await self._quiet("the duplicates")
        await self._step("duplicates", f"the event of order 1 pushed {counted(_DUPLICATES, 'time')} more", state)

        await self._write(lambda connection: set_fault(connection, _SALES, ERROR))
        await self._place(plan.first + 1, plan.during)
        state = self._expect(plan.all, sold=plan.first, dead=plan.during)
        await self._step(
            "outage",
            f"{_SALES} fails for {counted(plan.during, 'more order')}, {counted(_ATTEMPTS, 'attempt')} each",
            state,
        )
        letters = await self._read(lambda connection: dead_letters(connection, DeadFilter(), plan.during))
        tried = {(letter.receiver, letter.attempts) for letter in letters}
        self.verdict.require(
            tried == {(_SALES, _ATTEMPTS)},
            f"each dead letter must be of {_SALES}, {counted(_ATTEMPTS, 'attempt')}, but are {tried}",
        )

    async def rebuild(self) -> None:
        """A new generation beside the one that is served; the order that comes meanwhile is refused."""
        plan = self.plan
        await self._write(lambda connection: clear_fault(connection, _SALES))
        handle = await self.runs.start_rebuild(RebuildInput(hold=True))
        rebuild = await self._until(self._replayed, "the rebuild replays the history")
        state = self._expect(plan.all, sold=plan.first, dead=plan.during, intake=PAUSED)
        await self._step(
            "rebuilding", f"{rebuild.generation} holds {counted(rebuild.replayed, 'order')}, {INITIAL} is served", state
        )
        await self._check_generations({INITIAL: (ACTIVE, plan.first), rebuild.generation: (BUILDING, plan.all)})
        await self._check_api(INITIAL, plan.first)
        try:
            await self._write(resume_intake)
            self.verdict.require(False, "intake must not be resumed while a rebuild runs, but was")
        except Refused:
            pass
        try:
            await self.runs.start_rebuild(RebuildInput())
            self.verdict.require(False, "a second rebuild must be refused while one runs, but was started")
        except WorkflowAlreadyStartedError:
            pass
        await self._refused_order(plan.all + 1)
        await self._step("refused", f"order {plan.all + 1} is refused: 503 order intake paused", state)

        await handle.signal(PROCEED_SIGNAL)
        try:
            async with asyncio.timeout(self._patience):
                await handle.result()
        except TimeoutError:
            raise LabFailed(f"the rebuild took longer than {self._patience:g} s; is the machine overloaded?") from None
        done = await self._read(last_rebuild)
        assert done is not None
        self.verdict.require(
            done.state == COMPLETED, f"the rebuild must be {COMPLETED}, but is {done.state}: {done.error}"
        )
        state = self._expect(
            plan.all, sold=plan.all, dead=plan.during, intake=PAUSED, generation=rebuild.generation, certified=rebuild
        )
        await self._step("activated", f"{rebuild.generation} is proved equal and served", state)
        await self._check_generations({INITIAL: (RETIRED, plan.first), rebuild.generation: (ACTIVE, plan.all)})

    async def after(self) -> None:
        """Intake opens again; the dead letters are delivered, and add nothing."""
        plan = self.plan
        rebuild = await self._read(last_rebuild)
        assert rebuild is not None
        await self._write(resume_intake)
        state = self._expect(
            plan.all, sold=plan.all, dead=plan.during, generation=rebuild.generation, certified=rebuild
        )
        await self._step("resumed", "orders are taken again", state)
        await self._check_api(rebuild.generation, plan.all)

        now = now_ms()
        redrive, _ = await self._write(
            lambda connection: freeze_redrive(connection, "recovery", DeadFilter(), now, now)
        )
        await self.runs.start_redrive(redrive.request_id, None)
        await self._until(self._all_delivered, "the dead letters are delivered")
        state = self._expect(plan.all, sold=plan.all, generation=rebuild.generation, certified=rebuild)
        await self._step("redriven", f"{counted(redrive.total, 'dead letter')} delivered after the switch", state)

        found = await self._read(audit)
        for each in found.breaks:
            self.verdict.require(False, f"{each.invariant}: {each.what} ({each.count:,}): {', '.join(each.ids)}")
        await self._step("audit", "every invariant holds" if found.clean else "an invariant is broken", state)
        seen = await self._read(read_state)
        self.verdict.counts = {
            name: number for name, number in asdict(seen).items() if isinstance(number, int) and name != "certificate"
        }
        self.verdict.reason = (
            f"{plan.during} of {counted(plan.all, 'order')} missed {_SALES}; rebuilt, proved equal and switched to "
            f"{counted(seen.sales_orders, 'order')}, {seen.sales_amount:,} {_JPY}, without a mail more"
        )

    def _expect(
        self,
        orders: int,
        *,
        sold: int,
        dead: int = 0,
        intake: str = OPEN,
        generation: str = INITIAL,
        certified: Rebuild | None = None,
    ) -> State:
        """What must be read: order n has amount 100 n."""
        certificate = None
        if certified is not None:
            certificate = {
                "rebuild": certified.rebuild_id,
                "generation": certified.generation,
                "orders": orders,
                "sums": {_JPY: [orders, amount_of(orders)]},
            }
        return State(orders, sold, amount_of(sold), orders, dead, intake, generation, certificate)

    async def _step(self, name: str, what: str, expected: State) -> None:
        """Read until it is as expected, or for too long; then show and judge what was read last."""
        deadline = time.monotonic() + self._patience
        while True:
            state = await self._read(read_state)
            off = differences(expected, state)
            if not off or time.monotonic() > deadline:
                break
            await asyncio.sleep(_EVERY)
        for each in off:
            self.verdict.require(False, f"{name}: {each}")
        self.tell(Step(name, what, state))

    async def _place(self, start: int, count: int) -> None:
        for number in range(start, start + count):
            _, created = await asyncio.to_thread(self.api.place, numbered_order(number))
            self.verdict.require(created, f"order {number} must be new, but was known")

    async def _refused_order(self, number: int) -> None:
        """By the real command; it must write nothing."""
        before = await self._read(lambda connection: (count_orders(connection), outbox_status(connection).total))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_STARTER), "orders", "place", "--start", str(number), "--api", self.url),
            env={**self.scratch.stack.environment(), **process_env()},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        said = err.decode(errors="replace").strip()
        self.verdict.require(
            (process.returncode, out) == (1, b"") and said.endswith("503 order intake paused"),
            f"order {number} must be refused with 503 and exit code 1, but: {process.returncode}, {said}",
        )
        after = await self._read(lambda connection: (count_orders(connection), outbox_status(connection).total))
        self.verdict.require(after == before, f"a refused order must write nothing, but {before} became {after}")

    async def _check_api(self, generation: str, orders: int) -> None:
        """What a caller of the API sees."""
        sales = await asyncio.to_thread(self.api.sales)
        totals = {_JPY: {"orders": orders, "amount": amount_of(orders)}}
        expected = {"generation": generation, "orders": orders, "totals": totals}
        self.verdict.require(dict(sales) == expected, f"the API must serve {expected}, but serves {dict(sales)}")

    async def _check_generations(self, expected: dict[str, tuple[str, int]]) -> None:
        """State and totals of each generation."""
        found = {each.generation: (each.state, each.totals) for each in await self._read(list_generations)}
        wanted = {name: (state, {_JPY: (n, amount_of(n))}) for name, (state, n) in expected.items()}
        self.verdict.require(found == wanted, f"the generations must be {wanted}, but are {found}")

    async def _quiet(self, what: str) -> None:
        """Wait until nothing is under way."""

        async def at_rest() -> bool:
            if await asyncio.to_thread(self.events.length):
                return False
            return await self._read(_nothing_under_way)

        deadline = time.monotonic() + self._patience
        while not await at_rest():
            self._still(deadline, what)
            await asyncio.sleep(_EVERY)

    async def _until(self, ask: Callable[[Connection], T | None], what: str) -> T:
        """The first answer of `ask`. Raises LabFailed when none comes."""
        deadline = time.monotonic() + self._patience
        while not (answer := await self._read(ask)):
            self._still(deadline, what)
            await asyncio.sleep(_EVERY)
        return answer

    def _still(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise LabFailed(f"not within {self._patience:g} s: {what}; is the machine overloaded?")

    def _replayed(self, connection: Connection) -> Rebuild | None:
        rebuild = last_rebuild(connection)
        if rebuild is None or rebuild.phase != "reconciling":
            return None
        return rebuild

    def _all_delivered(self, connection: Connection) -> bool:
        states = {each.receiver: each.counts for each in receiver_status(connection)}
        return states[_SALES][DONE] == self.plan.all

    @property
    def _patience(self) -> float:
        return _PATIENCE + 0.5 * self.plan.all

    async def _read(self, work: Callable[[Connection], T]) -> T:
        def snapshot() -> T:
            with self.database.read() as connection:
                return work(connection)

        return await asyncio.to_thread(snapshot)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        def transaction() -> T:
            with self.database.write() as connection:
                return work(connection)

        return await asyncio.to_thread(transaction)


def _nothing_under_way(connection: Connection) -> bool:
    outbox = outbox_status(connection)
    moving = sum(each.counts[PENDING] + each.counts[RETRYING] for each in receiver_status(connection))
    return not (outbox.pending or outbox.in_flight or moving)

"""A receiver that is down is put on hold: nothing is spent, order is kept, and it goes on as soon as it is back."""

from collections.abc import Awaitable, Callable, Iterator

import pytest
from sqlalchemy import Connection
from temporalio.exceptions import ApplicationError

import activities.delivering
import pipeline.receiving
from activities.delivering import DeliveryActivities
from contracts.events import Event
from contracts.messages import DeliveryInput, DrainReport
from pipeline.receiving import ReceiverStage
from pipeline.stage import Limits, drain
from receivers.base import Receiver, ReceiverUnavailable
from receivers.builtin import Billing, Sales
from receivers.drill import Drillable
from store.clock import now_ms
from store.engine import Database
from store.faults import ERROR, OUTAGE, clear_fault, fault_mode, set_fault
from tests.activities.stages import Recorder, Stages, stages
from tests.store.rebuilding import fill
from tests.store.scenes import append, place, rows

pytestmark = pytest.mark.anyio

DOWN = ReceiverUnavailable("the line is dead")


class Down(Recorder):
    """Unavailable while `down`; for the events in `errors` it raises what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.down: Exception | None = None

    def deliver(self, connection: Connection, event: Event) -> None:
        if self.down is not None:
            self.calls.append(event.event_id)
            raise self.down
        super().deliver(connection, event)


class Clock:
    """The time that receivers and attempts go by."""

    def __init__(self) -> None:
        self.skipped = 0

    def __call__(self) -> int:
        return now_ms() + self.skipped


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pipeline.receiving, "now_ms", clock)
    monkeypatch.setattr(activities.delivering, "now_ms", clock)
    return clock


@pytest.fixture
def receiver() -> Down:
    return Down()


@pytest.fixture
def scene(sqlite: Database, redis_url: str, receiver: Down) -> Iterator[Stages]:
    with stages(sqlite, redis_url, receiver, backoff=1.0) as scene:
        yield scene


async def fan_out(scene: Stages) -> None:
    await scene.drain(scene.relay, scene.fan_out)


async def step(scene: Stages, times: int = 1) -> int:
    """So many transactions of the receiver; how many events left `pending`."""
    return sum([await scene.receivers["recorder"].step() for _ in range(times)])


async def attempt(scene: Stages, receiver: Receiver, event_id: str) -> str:
    """One attempt of the event's own run: the state that it comes to, or the kind of its error."""

    async def settled(_: str) -> None:
        pass

    own = DeliveryActivities(scene.writer, {receiver.name: receiver}, scene.hub, retry=scene.retry, settled=settled)
    try:
        return (await own.attempt_delivery(DeliveryInput(receiver.name, event_id, "a"))).state
    except ApplicationError as error:
        return error.type or ""


def attempts(scene: Stages) -> dict[str, int]:
    """Event id -> attempts spent, of those that spent any."""
    return dict(
        rows(
            scene.database,
            "SELECT event_id, attempts FROM deliveries d JOIN outbox o ON o.position = d.position WHERE attempts > 0",
        )  # type: ignore[arg-type]
    )


def many(scene: Stages, count: int, each: int = 1) -> None:
    for number in range(count):
        append(scene.database, f"a{number:03}", *range(1, each + 1))


async def test_a_receiver_that_is_down_for_a_day_spends_nothing_and_goes_on_in_order(
    scene: Stages, receiver: Down, clock: Clock
) -> None:
    many(scene, 20, each=3)
    await fan_out(scene)
    receiver.down = DOWN
    began = clock()
    for _ in range(24 * 4):
        assert await step(scene, 3) == 0
        clock.skipped += 15 * 60_000
    hold = scene.receivers["recorder"].hold
    assert hold is not None
    assert began <= hold.since < began + 60_000
    assert hold.reason == "ReceiverUnavailable: the line is dead"
    assert (scene.counts(), attempts(scene)) == ({"pending": 60}, {})
    assert scene.effects() == []
    receiver.down = None
    receiver.calls.clear()
    await scene.drain(scene.receivers["recorder"])
    assert scene.counts() == {"done": 60}
    assert scene.receivers["recorder"].hold is None
    assert rows(scene.database, "SELECT held_since, reason FROM receivers") == [(None, None)]
    assert attempts(scene) == {}
    for number in range(20):
        name = f"a{number:03}"
        assert [call for call in receiver.calls if call.startswith(name)] == [f"{name}-{seq}" for seq in (1, 2, 3)]
    assert len(receiver.calls) == 60


@pytest.mark.parametrize(
    "error", [DOWN, ConnectionRefusedError("no"), ConnectionResetError("gone"), TimeoutError("slow")], ids=repr
)
async def test_whatever_says_that_the_other_side_is_away_holds(scene: Stages, receiver: Down, error: Exception) -> None:
    many(scene, 3)
    await fan_out(scene)
    receiver.down = error
    await step(scene, 5)
    hold = scene.receivers["recorder"].hold
    assert hold is not None
    assert hold.reason == f"{type(error).__name__}: {error}"
    assert (scene.counts(), attempts(scene)) == ({"pending": 3}, {})


async def test_probes_are_few_and_go_round_the_aggregates(scene: Stages, receiver: Down) -> None:
    many(scene, 5, each=2)
    await fan_out(scene)
    receiver.down = DOWN
    await step(scene)
    receiver.calls.clear()
    await step(scene, 10)
    # One call a probe, each aggregate in its turn, and of each only its first event.
    assert sorted(receiver.calls[:5]) == [f"a{number:03}-1" for number in range(5)]
    assert receiver.calls[5:] == receiver.calls[:5]


@pytest.mark.parametrize("place", [0, 4, 9], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize("batch", [500, 10, 3, 1])
async def test_one_event_that_is_always_unavailable_fails_by_itself(
    scene: Stages, receiver: Down, clock: Clock, place: int, batch: int
) -> None:
    bad = f"a{place:03}-1"
    many(scene, 10, each=2)
    await fan_out(scene)
    receiver.errors = {bad: DOWN}
    stage = scene.receivers["recorder"]
    for turn in range(40):
        stage._size.value = batch
        await step(scene)
        if turn == 30:  # behind the last of all, only another event can tell
            append(scene.database, "y", 1)
            await fan_out(scene)
    others = {"y-1": "done"} | {
        f"a{number:03}-{seq}": "done" for number in range(10) for seq in (1, 2) if number != place
    }
    assert scene.states() == others | {bad: "retrying", f"a{place:03}-2": "pending"}
    assert attempts(scene) == {bad: 1}
    assert stage.hold is None
    # Each time that others succeed between its attempts it spends one, and the fifth is the last.
    for spent in (2, 3, 4, 5):
        clock.skipped += 20_000
        append(scene.database, "z", spent)
        await fan_out(scene)
        await step(scene)
        expected = "dead" if spent == 5 else "ReceiverFailed"
        assert await attempt(scene, receiver, bad) == expected
        assert attempts(scene) == {bad: spent}
    assert scene.states()[f"a{place:03}-2"] == "pending"
    assert stage.hold is None


async def test_two_and_more_bad_events_in_a_row_do_not_hold_the_receiver_for_ever(
    scene: Stages, receiver: Down
) -> None:
    many(scene, 20)
    await fan_out(scene)
    bad = [f"a{number:03}-1" for number in range(3, 9)]
    receiver.errors = dict.fromkeys(bad, DOWN)
    await step(scene, 60)
    assert {event for event, state in scene.states().items() if state == "retrying"} == set(bad)
    assert scene.counts() == {"done": 14, "retrying": 6}
    assert scene.receivers["recorder"].hold is None


async def test_the_last_event_of_all_that_is_unavailable_holds_until_another_one_tells(
    scene: Stages, receiver: Down
) -> None:
    append(scene.database, "a", 1)
    append(scene.database, "b", 1)
    receiver.errors = {"b-1": DOWN}
    await fan_out(scene)
    await step(scene, 10)
    assert scene.states() == {"a-1": "done", "b-1": "pending"}
    assert attempts(scene) == {}
    assert scene.receivers["recorder"].hold is not None
    append(scene.database, "c", 1)
    await fan_out(scene)
    await step(scene, 4)
    assert scene.states() == {"a-1": "done", "b-1": "retrying", "c-1": "done"}
    assert scene.receivers["recorder"].hold is None


async def test_an_outage_that_ends_is_held_against_nobody_who_met_it(scene: Stages, receiver: Down) -> None:
    many(scene, 4)
    await fan_out(scene)
    for _ in range(3):
        receiver.down = DOWN
        await step(scene, 7)
        receiver.down = None
        await step(scene, 1)
    await scene.drain(scene.receivers["recorder"])
    assert (scene.counts(), attempts(scene)) == ({"done": 4}, {})
    assert len(scene.effects()) == 4


async def test_a_worker_that_starts_while_the_receiver_is_held_goes_on_probing(
    scene: Stages, receiver: Down, redis_url: str
) -> None:
    many(scene, 3)
    await fan_out(scene)
    receiver.down = DOWN
    await step(scene, 2)
    before = scene.receivers["recorder"].hold
    with stages(scene.database, redis_url, receiver) as twin:
        stage = twin.receivers["recorder"]
        await stage.begin()
        assert stage.hold == before
        receiver.calls.clear()
        assert await stage.step() == 0
        assert len(receiver.calls) == 1
        receiver.down = None
        await twin.drain(stage)
        assert twin.counts() == {"done": 3}


@pytest.mark.parametrize("failed_before", [1, 3])
async def test_a_receiver_that_is_down_while_only_a_retrying_event_waits_spends_nothing(
    scene: Stages, receiver: Down, clock: Clock, failed_before: int
) -> None:
    append(scene.database, "a", 1, 2)
    await fan_out(scene)
    receiver.errors = {"a-1": ValueError("bad")}
    await step(scene)
    for _ in range(failed_before - 1):
        clock.skipped += 60_000
        assert await attempt(scene, receiver, "a-1") == "ReceiverFailed"
    receiver.down = DOWN
    for _ in range(24):
        clock.skipped += 3_600_000
        assert await attempt(scene, receiver, "a-1") == "ReceiverUnavailable"
        await step(scene)
    assert attempts(scene) == {"a-1": failed_before}
    assert scene.states() == {"a-1": "retrying", "a-2": "pending"}
    receiver.down, receiver.errors = None, {}
    clock.skipped += 60_000
    assert await attempt(scene, receiver, "a-1") == "done"
    await scene.drain(scene.receivers["recorder"])
    assert scene.effects() == ["a-1", "a-2"]


async def test_a_retrying_event_that_succeeds_ends_the_hold(scene: Stages, receiver: Down, clock: Clock) -> None:
    append(scene.database, "a", 1)
    await fan_out(scene)
    receiver.errors = {"a-1": ValueError("bad")}
    await step(scene)
    append(scene.database, "b", 1)
    await fan_out(scene)
    receiver.down = DOWN
    await step(scene, 3)
    assert scene.receivers["recorder"].hold is not None
    receiver.down, receiver.errors = None, {}
    clock.skipped += 60_000
    assert await attempt(scene, receiver, "a-1") == "done"
    assert rows(scene.database, "SELECT held_since FROM receivers") == [(None,)]
    await scene.drain(scene.receivers["recorder"])
    assert scene.counts() == {"done": 2}


async def test_other_receivers_notice_nothing(sqlite: Database, redis_url: str) -> None:
    receivers = [Drillable(Billing()), Drillable(Sales())]
    with stages(sqlite, redis_url, *receivers) as scene:
        with sqlite.write() as connection:
            set_fault(connection, "sales", OUTAGE)
        place(sqlite, *range(1, 31))
        await fan_out(scene)
        for name in ("sales", "billing", "sales"):
            while await scene.receivers[name].step():
                pass
        assert scene.counts("billing") == {"done": 30}
        assert scene.counts("sales") == {"pending": 30}
        assert scene.receivers["billing"].hold is None
        hold = scene.receivers["sales"].hold
        assert hold is not None
        assert hold.reason == "ReceiverUnavailable: sales is switched off (fault on --mode outage)"
        with sqlite.write() as connection:
            assert clear_fault(connection, "sales")
            assert not clear_fault(connection, "sales")
        await scene.drain(scene.receivers["sales"])
        assert scene.counts("sales") == {"done": 30}
        assert attempts(scene) == {}


async def test_a_fault_of_mode_error_is_each_events_own_failure(sqlite: Database, redis_url: str) -> None:
    with stages(sqlite, redis_url, Drillable(Sales())) as scene:
        with sqlite.write() as connection:
            set_fault(connection, "sales", OUTAGE)
            set_fault(connection, "sales", ERROR)  # the later switch counts
            assert fault_mode(connection, "sales") == ERROR
        place(sqlite, 1, 2, 3)
        await fan_out(scene)
        await scene.drain(scene.receivers["sales"])
        assert scene.counts("sales") == {"retrying": 3}
        assert scene.receivers["sales"].hold is None
        assert scene.scalar("SELECT min(last_error) FROM deliveries") == (
            "InjectedFault: sales is switched to fail (fault on)"
        )


async def _count_steps(stage: ReceiverStage, run: Callable[[float], Awaitable[DrainReport]]) -> int:
    """Drain it to the end; in how many steps that moved something."""
    step, moving = stage.step, 0

    async def counted() -> int:
        nonlocal moving
        moved = await step()
        moving += bool(moved)
        return moved

    stage.step = counted  # type: ignore[method-assign]
    while (await run(30)).more:
        pass
    return moving


async def test_ten_thousand_events_during_an_outage_drain_at_full_speed_when_it_ends(
    sqlite: Database, redis_url: str
) -> None:
    with stages(sqlite, redis_url, Drillable(Sales())) as scene:
        fill(sqlite, 10_000, fanned_out=False)
        with sqlite.write() as connection:
            set_fault(connection, "sales", OUTAGE)
        await fan_out(scene)
        stage = scene.receivers["sales"]

        def run(longest: float) -> Awaitable[DrainReport]:
            return drain(
                stage, scene.hub, Limits(0.1, longest), stopping=lambda: False, beat=lambda events, batches: None
            )

        report = await run(5)
        assert (report.events, report.more, report.reason) == (
            0,
            True,
            "ReceiverUnavailable: sales is switched off (fault on --mode outage)",
        )
        report = await run(0.5)  # on hold all the time
        assert (report.events, report.held_since) == (0, stage.hold.since)
        with sqlite.write() as connection:
            clear_fault(connection, "sales")
        steps = await _count_steps(stage, run)
        assert scene.counts("sales") == {"done": 10_000}
        assert attempts(scene) == {}
        assert rows(sqlite, "SELECT sum(orders), sum(amount) FROM sales_totals") == [(10_000, 10_000 * 10_001 // 2)]
        assert scene.scalar("SELECT count(*) FROM sales_applied") == 10_000
        # By batches: probed one by one they would be as many steps as events.
        assert steps < 1_000

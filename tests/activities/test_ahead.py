"""Stages that are handed work while their runs are at rest: drained here at once, until their runs take over."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
from temporalio.testing import ActivityEnvironment

from activities.draining import DrainActivities
from contracts.messages import DrainInput
from contracts.names import FAN_OUT_ID
from pipeline.ahead import Ahead
from pipeline.hub import Hub
from pipeline.relay import RelayStage
from pipeline.stage import Limits
from store.control import clear_lease
from store.engine import Database
from store.receivers import Hold
from tests.activities.stages import stages
from tests.store.scenes import place
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


class Fed:
    """Moves what is put into `work`, and notes whether two drains ever stepped it at once."""

    fed_by: str | None = None
    watch: Callable[[], bool] | None = None
    more = True
    hold: Hold | None = None
    waits: str | None = None

    def __init__(self, name: str = "fed") -> None:
        self.name = name
        self.work = self.moved = 0
        self.error: Exception | None = None
        self._stepping = self.crowded = False

    async def begin(self) -> None:
        self.crowded |= self._stepping

    async def sees_work(self) -> bool:
        return True

    async def step(self) -> int:
        self.crowded |= self._stepping
        self._stepping = True
        await asyncio.sleep(0)
        self._stepping = False
        if self.error is not None:
            raise self.error
        moved, self.work = self.work, 0
        self.moved += moved
        return moved

    async def may_rest(self, idle: float) -> bool:
        return True


class Scene:
    """Two stages, the hub, and who was woken."""

    def __init__(self, idle: float) -> None:
        self.hub = Hub()
        self.fed, self.other = Fed(), Fed("other")
        self.woken: list[str] = []
        self.errors: list[Exception] = []
        self.ahead = Ahead([self.fed, self.other], self.hub, idle, self._wake)
        self.hub.absent = self.ahead.begin

    async def _wake(self, names: Iterable[str]) -> None:
        if self.errors:
            raise self.errors.pop()
        self.woken += names

    def hand_over(self, stage: Fed, count: int) -> None:
        stage.work += count
        self.hub.notify([stage.name])

    def activities(self) -> DrainActivities:
        async def why_ended(_: str) -> None:
            return None

        return DrainActivities([self.fed, self.other], self.hub, Limits(0.01, 5), why_ended, self.ahead)


@pytest.fixture
def scene() -> Scene:
    return Scene(idle=60)


async def test_after_a_rest_what_is_handed_work_is_drained_at_once_and_its_run_is_woken(scene: Scene) -> None:
    scene.ahead.after_rest()
    for _ in range(3):
        scene.hand_over(scene.fed, 2)
    scene.hand_over(scene.other, 1)
    await eventually(lambda: (scene.fed.moved, scene.other.moved) == (6, 1), 5, "both are drained")
    assert scene.woken == []  # the work goes first
    await eventually(lambda: scene.woken == ["fed", "other"], 5, "each run is woken, once")
    scene.hand_over(scene.fed, 1)
    await eventually(lambda: scene.fed.moved == 7, 5, "it is still drained")
    await scene.ahead.close()
    assert not scene.hub.is_draining("fed")
    assert scene.woken == ["fed", "other"]


async def test_nothing_begins_without_a_rest_nor_long_after_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hand_over(scene.fed, 1)
    assert not scene.ahead._begun
    clock = 1000.0
    monkeypatch.setattr("pipeline.ahead.time", SimpleNamespace(monotonic=lambda: clock))  # the loop keeps its own
    scene.ahead.after_rest()
    clock += 6
    scene.hand_over(scene.fed, 1)  # drained in another worker by now
    assert not scene.ahead._begun
    scene.ahead.after_rest()
    scene.hub.notify(["receiver/of-another-worker"])
    assert not scene.ahead._begun


async def test_the_runs_own_drain_takes_over_and_counts_what_was_moved(scene: Scene) -> None:
    scene.ahead.after_rest()
    scene.hand_over(scene.fed, 3)
    await eventually(lambda: scene.fed.moved == 3, 5, "it is drained ahead")
    scene.fed.work = 4
    report = await ActivityEnvironment().run(scene.activities().drain, DrainInput("fed"))
    assert report.events == 7
    assert not scene.ahead._begun
    report = await ActivityEnvironment().run(scene.activities().drain, DrainInput("fed"))
    assert report.events == 0  # counted once
    await scene.ahead.close()


async def test_the_wait_for_a_slow_batch_begun_ahead_counts_for_the_heartbeat(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("activities.draining.time", SimpleNamespace(monotonic=lambda: clock))  # the loop keeps its own
    beats: list[tuple[int, int]] = []

    async def slow(stage: str) -> int:
        nonlocal clock
        clock += 10
        return 3

    monkeypatch.setattr(scene.ahead, "relieve", slow)
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append((scene.fed.moved, *details))
    scene.fed.work = 1
    await environment.run(scene.activities().drain, DrainInput("fed"))
    assert beats[0] == (0, 0, 0)  # before the next batch, which may be as slow


async def test_word_that_comes_while_the_runs_drain_takes_over_begins_no_second_one(scene: Scene) -> None:
    taken_over = 0

    async def keep_feeding() -> None:
        while taken_over < 20:
            scene.ahead.after_rest()
            scene.hand_over(scene.fed, 1)
            await asyncio.sleep(0)

    feeding = asyncio.create_task(keep_feeding())
    drains = scene.activities()
    drains._limits = Limits(0.01, 0.01)
    events = 0
    for _ in range(20):
        await eventually(lambda: scene.ahead._begun, 5, "it is drained ahead")
        events += (await ActivityEnvironment().run(drains.drain, DrainInput("fed"))).events
        taken_over += 1
    await feeding
    await eventually(lambda: scene.fed.work == 0, 5, "what came last is drained")
    await scene.ahead.close()
    assert not scene.fed.crowded
    assert events + await scene.ahead.relieve("fed") == scene.fed.moved


async def test_what_rests_before_its_run_comes_is_counted_all_the_same() -> None:
    scene = Scene(idle=0.01)
    scene.ahead.after_rest()
    scene.hand_over(scene.fed, 3)
    await eventually(lambda: scene.fed.moved == 3 and not scene.ahead._begun, 5, "it rests")
    report = await ActivityEnvironment().run(scene.activities().drain, DrainInput("fed"))
    assert report.events == 3
    await scene.ahead.close()


async def test_an_error_ahead_is_left_to_the_run_and_a_failed_wake_to_the_look(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.ahead")
    scene.fed.error = ConnectionError("Redis does not answer")
    scene.errors = [RuntimeError("Temporal is away")]
    scene.ahead.after_rest()
    scene.hand_over(scene.fed, 1)
    await eventually(lambda: "a wake failed (Temporal is away)" in caplog.text, 5, "the wake fails")
    assert "fed was not drained ahead of its run: Redis does not answer" in caplog.text
    with pytest.raises(ConnectionError):
        await ActivityEnvironment().run(scene.activities().drain, DrainInput("fed"))
    scene.fed.error = None
    scene.hand_over(scene.fed, 1)
    await eventually(lambda: scene.woken == ["fed"], 5, "the next one is tried again")
    await scene.ahead.close()
    assert scene.fed.moved == 2


async def test_the_relay_tells_of_a_rest_only_when_nobody_held_the_lease(sqlite: Database, redis_url: str) -> None:
    rests: list[str] = []
    with stages(sqlite, redis_url) as scene:

        def relay() -> RelayStage:
            return RelayStage(
                scene.writer, scene.events, scene.hub, lease=15, after_rest=lambda: rests.append("rested")
            )

        await relay().begin()
        assert rests == ["rested"]
        await relay().begin()  # the next drain of a run that goes on
        assert rests == ["rested"]
        with sqlite.write() as connection:
            clear_lease(connection)
        await relay().begin()
        assert rests == ["rested"] * 2


async def test_an_order_goes_through_before_any_run_but_the_relays_is_awake(sqlite: Database, redis_url: str) -> None:
    with stages(sqlite, redis_url) as scene:
        woken: list[str] = []

        async def wake(names: Iterable[str]) -> None:
            woken.extend(names)

        every = (scene.fan_out, *scene.receivers.values())
        scene.fan_out._next_stages = tuple(stage.name for stage in scene.receivers.values())
        ahead = Ahead(every, scene.hub, 60, wake)
        scene.hub.absent = ahead.begin
        place(sqlite, 1)
        await scene.relay.begin()
        ahead.after_rest()
        assert await scene.relay.step() == 1
        done = "SELECT count(*) FROM deliveries WHERE status = 'done'"
        await eventually(lambda: scene.scalar(done) == 3, 5, "all receivers have it")
        await eventually(lambda: sorted(woken) == sorted(stage.name for stage in every), 5, "their runs are woken")
        assert woken[0] == FAN_OUT_ID
        await ahead.close()

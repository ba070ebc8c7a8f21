"""How a stage is drained: the hub, the size of a batch, and the steps that hand over to the next stage."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, event

import pipeline.relay
import pipeline.stage
from contracts.events import ORDER_PLACED
from contracts.messages import DrainReport
from contracts.names import FAN_OUT_ID, RELAY_ID
from pipeline.fan_out import FanOutStage
from pipeline.hub import Hub
from pipeline.stage import BatchSize, Limits, drain
from store.engine import Database
from store.receivers import Hold
from store.status import outbox_status
from tests.activities.stages import Scripted, Stages, stages
from tests.store.scenes import append, place
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def scene(sqlite: Database, redis_url: str) -> Iterator[Stages]:
    with stages(sqlite, redis_url) as scene:
        yield scene


def never() -> bool:
    return False


async def test_the_relays_mark_and_the_fan_out_share_a_commit(
    scene: Stages, sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.relay, "_PATIENCE", 60.0)  # also on a machine that is busy
    monkeypatch.setattr(scene.writer, "_joinable", 60.0)
    place(sqlite, 1)
    threads: list[str] = []
    event.listen(sqlite.engine, "commit", lambda connection: threads.append(threading.current_thread().name))
    relay = asyncio.create_task(scene.relay.step())
    assert await scene.hub.wait(FAN_OUT_ID, 60)
    assert await scene.fan_out.step() == 1
    assert await relay == 1
    assert sum(name.startswith("saisei-writer") for name in threads) == 1
    with sqlite.read() as connection:
        assert outbox_status(connection).fanned_out == 1


async def test_a_drain_ends_after_it_was_idle() -> None:
    stage, beats = Scripted(3, 0, 4), []
    report = await drain(
        stage, Hub(), Limits(0.02, 10), stopping=never, beat=lambda events, batches: beats.append((events, batches))
    )
    assert report == DrainReport(7, 2, more=False)
    assert beats[-1] == (7, 2)
    assert stage.begun == 1
    assert min(stage.asked) >= 0.02


async def test_a_drain_that_may_not_rest_goes_on_to_its_limit() -> None:
    report = await drain(
        Scripted(1, rest=False), Hub(), Limits(0.01, 1.0), stopping=never, beat=lambda events, batches: None
    )
    assert report == DrainReport(1, 1, more=True)


async def test_a_drain_ends_early_when_the_worker_stops() -> None:
    stage, beats = Scripted(*[1] * 100), []
    report = await drain(
        stage, Hub(), Limits(1, 10), stopping=lambda: len(beats) > 3, beat=lambda *beat: beats.append(beat)
    )
    assert report.more
    assert report.events == 3


async def test_the_hub_wakes_a_waiting_stage_and_knows_who_drains() -> None:
    hub = Hub()
    waiting = asyncio.create_task(hub.wait("a", 600))
    await asyncio.sleep(0)
    hub.notify(["a", "b"])
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(hub.wait("b", 600), 60)  # told before it waited
    started = time.monotonic()
    assert not await hub.wait("b", 0.01)  # the word counts once
    assert time.monotonic() - started >= 0.009
    news = [True, False, False]
    assert await asyncio.wait_for(hub.wait("a", 600, news.pop), 60)
    assert not news
    with hub.draining("a"), hub.draining("a"):
        assert hub.is_draining("a")
    assert not hub.is_draining("a")
    with pytest.raises(KeyError), hub.draining("a"):
        raise KeyError
    assert not hub.is_draining("a")


def test_the_size_of_a_batch_follows_its_time() -> None:
    size = BatchSize()
    for _ in range(20):
        size.observe(size.value, 0.001)
    assert size.value == 2000
    size.observe(10, 0.001)  # a small batch that was quick says nothing about large ones
    assert size.value == 2000
    for _ in range(20):
        size.observe(size.value, size.value / 50_000)  # 50 events a millisecond
    assert 700 < size.value < 900
    size.observe(10, 1.0)
    assert size.value < 500
    for _ in range(50):
        size.observe(size.value, 0.5)
    assert size.value == 50
    size.observe(50, 0.0)
    assert size.value == 2000
    for _ in range(20):
        size.observe(60, 0.010, left=size.value - 60)  # events failed, and no more was reached in time
    assert 90 < size.value < 100


async def test_steps_hand_over_to_the_next_stage(scene: Stages) -> None:
    place(scene.database, 1)
    waiting = asyncio.create_task(scene.hub.wait(FAN_OUT_ID, 600))
    await asyncio.sleep(0)
    await scene.relay.step()
    await asyncio.wait_for(waiting, 60)


async def test_receivers_are_told_only_of_what_somebody_takes(scene: Stages) -> None:
    fan_out = FanOutStage(scene.writer, scene.events, scene.hub, ["next"])
    for event_type, told in (("nobody-takes-it", False), (ORDER_PLACED, True)):
        append(scene.database, event_type, 1, event_type=event_type)
        await scene.relay.step()
        assert await fan_out.step() == 1
        assert scene.hub.is_notified("next") is told


async def test_a_look_that_failed_is_not_taken_for_one_that_found_nothing(
    scene: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds what is there, though nobody has written since."""

    class Down(Exception):
        """Our own database does not answer."""

    def fail(*_: object, **__: object) -> None:
        raise Down

    billing = scene.receivers["billing"]
    assert [await billing.sees_work(), await billing.sees_work()] == [False, False]
    place(scene.database, 1)
    await scene.drain(scene.relay, scene.fan_out)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.receiving.first_next", fail)
        with pytest.raises(Down):
            await billing.sees_work()
    assert await billing.sees_work()
    assert await billing.step() == 1


async def test_the_relay_stirs_for_what_waits_and_not_for_what_the_stages_behind_it_commit(scene: Stages) -> None:
    watch = scene.relay.watch
    assert watch is not None
    assert not watch()
    place(scene.database, 1)
    assert watch()
    assert watch()  # until it was taken
    assert await scene.relay.step() == 1
    assert not watch()
    await scene.drain(scene.fan_out, *scene.receivers.values())
    assert not watch()


async def test_a_stage_waits_for_word_where_its_feeder_drains_here_and_else_looks_for_itself() -> None:
    for fed_here in (True, False):
        hub, stage, waits = Hub(), Scripted(1), []
        stage.fed_by, stage.more, wait = "feeder", False, hub.wait

        async def noted(name: str, timeout: float, watch: Callable[[], bool] | None = None) -> bool:
            waits.append(timeout)  # noqa: B023
            return await wait(name, timeout, watch)  # noqa: B023

        hub.wait = noted  # type: ignore[method-assign]
        with hub.draining("feeder") if fed_here else contextlib.nullcontext():
            await drain(stage, hub, Limits(0.1, 5), stopping=never, beat=lambda *_: None)
        assert waits[:3] == ([0, 0.05, 0.05] if fed_here else [0, 0.003, 0.006])


@pytest.mark.parametrize("more", [True, False])
async def test_a_batch_that_left_nothing_is_not_followed_by_another_step(more: bool) -> None:
    stage = Scripted(1, 1)
    stage.more = more
    steps: list[int] = []

    async def sees_work() -> bool:
        steps.append(stage.steps)
        return stage.steps < 2

    stage.sees_work = sees_work  # type: ignore[method-assign]
    report = await drain(stage, Hub(), Limits(0.01, 5), stopping=never, beat=lambda *_: None)
    assert report.events == 2
    assert steps[:2] == ([0, 3] if more else [0, 1])


async def test_an_order_costs_each_receiver_one_transaction(scene: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes nothing holds up whoever places the next order."""
    taken: list[str] = []
    for name, stage in scene.receivers.items():

        def take(connection: Connection, name: str = name, take: Callable[..., Any] = stage._take) -> Any:
            taken.append(name)
            return take(connection)

        monkeypatch.setattr(stage, "_take", take)
    scene.fan_out._next_stages = tuple(stage.name for stage in scene.receivers.values())
    stop = asyncio.Event()
    every = (scene.relay, scene.fan_out, *scene.receivers.values())
    tasks = [
        asyncio.create_task(drain(stage, scene.hub, Limits(60, 60), stopping=stop.is_set, beat=lambda *_: None))
        for stage in every
    ]
    done = "SELECT count(*) FROM deliveries WHERE status = 'done'"
    for number in range(1, 6):
        await scene.writer.call(partial(place, scene.database, number))
        await eventually(lambda number=number: scene.scalar(done) == 3 * number, 60, "all receivers have it")
    stop.set()
    await asyncio.gather(*tasks)
    assert set(Counter(taken).values()) <= {5, 6}  # 6: its look of its own came just between the commit and the word


async def test_the_stages_of_one_worker_hand_an_order_through(scene: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, may_rest = asyncio.Event(), scene.relay.may_rest

    async def after_the_order(idle: float) -> bool:
        return placed.is_set() and await may_rest(idle)

    async def run(name: str) -> DrainReport:
        stage = {RELAY_ID: scene.relay, FAN_OUT_ID: scene.fan_out}.get(name) or scene.receivers[name]
        return await drain(stage, scene.hub, Limits(0.3, 60), stopping=never, beat=lambda *_: None)

    monkeypatch.setattr(scene.relay, "may_rest", after_the_order)
    tasks = [asyncio.create_task(run(name)) for name in (RELAY_ID, FAN_OUT_ID, "billing", "mail", "sales")]
    await eventually(lambda: scene.hub.is_draining(RELAY_ID), 60, "the relay drains")
    await scene.writer.call(lambda: place(scene.database, *range(1, 51)))
    placed.set()
    reports = await asyncio.gather(*tasks)
    assert [report.events for report in reports] == [50] * 5
    assert not any(report.more for report in reports)


async def test_a_receiver_on_hold_is_probed_once_a_second_at_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(pipeline.stage, "asyncio", SimpleNamespace(sleep=note))
    stage = Scripted(rest=False)
    stage.hold = Hold(7, "down")
    await drain(
        stage, Hub(), Limits(0, 60), stopping=lambda: len(waits) == 6, beat=lambda events, batches: None, held_since=7
    )
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert stage.steps == 6

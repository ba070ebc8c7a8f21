"""When a stage goes to rest, and the lease that lets intake be silent until then."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pipeline.stage import Limits, drain
from store.clock import now_ms
from store.control import read_control
from store.engine import Database
from store.orders import place_order
from tests.activities.stages import Stages, stages
from tests.store.scenes import order, place

pytestmark = pytest.mark.anyio


@pytest.fixture
def scene(sqlite: Database, redis_url: str) -> Iterator[Stages]:
    with stages(sqlite, redis_url) as scene:
        yield scene


async def test_intake_is_silent_while_the_lease_is_held_and_speaks_after(scene: Stages) -> None:
    def place_one(number: int) -> bool:
        with scene.database.write() as connection:
            return place_order(connection, order(number), now_ms()).cold

    assert place_one(1)
    await scene.relay.begin()
    assert not place_one(2)
    assert not await scene.relay.may_rest(1)  # two events wait
    assert not place_one(3)
    await scene.drain()
    assert await scene.relay.may_rest(1)
    assert place_one(4)
    with scene.database.read() as connection:
        assert read_control(connection).hot_until == 0


async def test_an_order_placed_while_the_drain_goes_to_rest_is_never_left_unseen(
    database: Database, redis_url: str
) -> None:
    """Whoever reads the lease as held is seen by the drain that holds it: no wake, and nothing is lost."""
    with stages(database, redis_url) as scene:
        stop, woken = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        placed, silent, wakes = [0] * 6, [0] * 6, 0

        def wake() -> None:
            nonlocal wakes
            wakes += 1
            woken.set()

        def intake(thread: int) -> None:
            jitter = random.Random(thread)
            while not stop.is_set():
                placed[thread] += 1
                with database.write() as connection:
                    cold = place_order(connection, order(thread * 100_000 + placed[thread]), now_ms()).cold
                if cold:
                    loop.call_soon_threadsafe(wake)
                else:
                    silent[thread] += 1
                stop.wait(jitter.random() * 0.2)

        threads = [threading.Thread(target=intake, args=(number,)) for number in range(len(placed))]
        for thread in threads:
            thread.start()
        rests, more = 0, True
        deadline = time.monotonic() + 60
        while more or not stop.is_set() or woken.is_set():  # the loop of RelayWorkflow, without its safety timer
            if not more:
                rests += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), 0.1)
            woken.clear()
            report = await drain(scene.relay, scene.hub, Limits(0, 5), stopping=lambda: False, beat=lambda *_: None)
            more = report.more
            # The drain rests at once, so it is chance how many orders come while it works: on until both have been.
            enough = rests > 8 and wakes and any(silent)
            if (enough or time.monotonic() > deadline) and not stop.is_set():
                stop.set()
                await scene.writer.call(lambda: [thread.join() for thread in threads])
                await asyncio.sleep(0)  # wakes that are under way
        assert scene.scalar("SELECT count(*) FROM outbox WHERE status = 'PENDING'") == 0
        assert scene.scalar("SELECT count(*) FROM outbox") == sum(placed)
        assert rests > 3
        assert wakes
        assert any(silent)
        assert wakes + sum(silent) == sum(placed)


@pytest.mark.parametrize("spell", [5, 40])
async def test_the_moment_of_rest_is_shut_for_intake(
    database: Database, redis_url: str, open_database: Callable[..., Database], spell: int
) -> None:
    """Each thread places one order just when the lease is cleared; each is either seen by that drain or told it is
    cold."""
    with stages(database, redis_url) as scene:
        for turn in range(spell // 5):
            await scene.drain(scene.relay)
            await scene.relay.begin()
            gate = threading.Barrier(9)
            colds: list[bool] = []

            def intake(number: int) -> None:
                gate.wait(60)  # noqa: B023
                with database.write() as connection:
                    colds.append(place_order(connection, order(number), now_ms()).cold)  # noqa: B023

            threads = [threading.Thread(target=intake, args=(turn * 8 + index + 1,)) for index in range(8)]
            for thread in threads:
                thread.start()
            await scene.writer.call(lambda: gate.wait(60))  # noqa: B023
            rested = await scene.relay.may_rest(1)
            for thread in threads:
                thread.join()
            pending = scene.scalar("SELECT count(*) FROM outbox WHERE status = 'PENDING'")
            assert pending == 8
            if rested:
                # It saw none of them, so none of them may have read the lease as held.
                assert all(colds)
            else:
                with database.read() as connection:
                    assert read_control(connection).hot_until > now_ms()


async def test_a_fan_out_rests_only_after_the_relay_and_with_an_empty_list(scene: Stages) -> None:
    await scene.relay.begin()
    assert not await scene.fan_out.may_rest(1)
    assert await scene.relay.may_rest(1)
    assert await scene.fan_out.may_rest(1)
    scene.events.push(["anything"])
    assert not await scene.fan_out.may_rest(1)


async def test_a_receiver_stays_hot_for_what_is_on_its_way_but_not_for_ever(scene: Stages) -> None:
    billing = scene.receivers["billing"]
    assert await billing.may_rest(1)
    place(scene.database, 1)
    assert not await billing.may_rest(1)  # an event waits for the relay
    assert await billing.may_rest(11)
    await scene.drain(scene.relay, scene.fan_out)
    assert await scene.relay.may_rest(1)
    assert not await billing.may_rest(11)  # it is here
    await scene.drain(billing)
    assert await billing.may_rest(0)

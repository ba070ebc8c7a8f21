"""Whatever is killed during a rebuild, the saga goes on or ends cleanly, and readers never notice."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from contracts import search
from contracts.messages import RebuildInput
from embedded import TemporalServer
from pipeline import look as looking
from pipeline.event_list import EventList, connect
from pipeline.hub import Hub
from pipeline.look import Look
from runs.starts import Runs
from store.engine import Database
from tests.servers import fresh_namespace
from tests.store.rebuilding import everything, execute, generation, history, intake, rebuild, state
from tests.store.scenes import scalar
from tests.waiting import eventually
from tests.workflows.killing import Scene, carry_on, kill_workers
from tests.workflows.saga import (
    AFTER,
    BEFORE,
    STOPS,
    GatedWriter,
    Watch,
    activities_of,
    carried_on,
    goes_on,
    stands,
)
from tests.workflows.workers import workers

pytestmark = pytest.mark.anyio

INPUT = RebuildInput()
KILLS = [*STOPS, "fail_rebuild"]  # the last: the clean-up of one that cannot go well


@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", [BEFORE, AFTER])
async def test_a_rebuild_whose_worker_is_killed_at_any_step_is_carried_on_by_the_next_one(
    temporal_server: TemporalServer,
    database_urls: Callable[[int], list[str]],
    open_database: Callable[..., Database],
    when: str,
) -> None:
    scenes = []
    for step, url in zip(KILLS, database_urls(len(KILLS)), strict=True):
        database = open_database(url)
        history(database, range(1, 21))
        if step == "fail_rebuild":
            execute(database, "DELETE FROM orders WHERE id = 'order-2'")
        client = await fresh_namespace(temporal_server)
        scenes.append(Scene(step, when, client, database, await Runs(client, []).start_rebuild(INPUT)))
    before = [(everything(scene.database), generation(scene.database, "initial")) for scene in scenes]
    with contextlib.ExitStack() as watching:
        for scene in scenes:
            watching.enter_context(Watch(scene.database, every=0.25).watching())
        await kill_workers(temporal_server, scenes)
        reports = await carry_on(scenes)
    for scene, report, (untouched, old) in zip(scenes, reports, before, strict=True):
        kill = f"killed {scene.when} {scene.step}: {report!r}"
        done, made = rebuild(scene.database, "rebuild-1"), generation(scene.database, "generation-1")
        assert old is not None
        assert made is not None, kill
        assert everything(scene.database) == untouched, kill
        assert scalar(scene.database, "SELECT count(*) FROM rebuild_expected") == 0, kill
        if scene.step == "fail_rebuild":
            assert (done.state, made.state) == ("FAILED", "FAILED"), kill
            assert "unexpected: order-2:placed" in (done.error or ""), kill
            assert generation(scene.database, "initial") == old, kill
            with scene.database.write() as connection:  # what was taken away is put back by a hand
                connection.exec_driver_sql(
                    "INSERT INTO orders (id, sku, qty, amount, currency, placed_at)"
                    " VALUES ('order-2', 'sku-1', 1, 200, 'JPY', 1)"
                )
        else:
            assert (report["state"], report["expected"], report["replayed"]) == ("COMPLETED", 20, 20), kill
            assert (made.totals, state(scene.database, "initial")) == (old.totals, "RETIRED"), kill
        stands(scene.database, "rebuild-1", "initial" if scene.step == "fail_rebuild" else "generation-1")
    few = asyncio.Semaphore(6)

    async def again(scene: Scene) -> None:
        async with few:
            await goes_on(scene.client, scene.database)

    await asyncio.gather(*map(again, scenes))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[TemporalServer]:
    """A Temporal server that the test may kill; it knows our search attributes from the start."""
    attributes = {key.name: "Keyword" for key in search.ALL}
    server = TemporalServer(tmp_path / "own", headless=True, search_attributes=attributes)
    server.start()
    server.wait_ready(30)
    yield server
    server.kill()


class EveryGate(GatedWriter):
    """Stops after one of the saga's steps in each phase, in turn."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.left = [step for step in STOPS if step not in ("expect_chunk", "forget_expected")]  # one in each phase

    async def _stand_at(self, name: str, when: str) -> None:
        if when == AFTER and name in self.left[:1]:
            self.reached.set()
            await self.go.wait()
            self.go.clear()
            self.left.pop(0)


async def test_one_rebuild_goes_on_though_temporal_is_killed_in_every_phase_of_it(
    own_server: TemporalServer, sqlite: Database
) -> None:
    history(sqlite, range(1, 21))
    client = await Client.connect(own_server.address)
    writer = EveryGate(sqlite)
    runs = Runs(client, [])
    with Watch(sqlite, every=0.1).watching():
        handle = await runs.start_rebuild(INPUT)
        async with carried_on(sqlite, runs, handle, writer) as run:
            while writer.left:
                await run.at_the_gate()
                writer.reached.clear()
                step = writer.left[0]
                own_server.kill()
                writer.go.set()
                # The step at hand is committed, and its worker goes on without the server.
                await eventually(lambda s=step: s not in writer.left, 60, f"{step} is over")
                own_server.start()
                await asyncio.to_thread(own_server.wait_ready, 30)
            report = await run.outcome()
    assert (report["state"], report["expected"], report["replayed"]) == ("COMPLETED", 20, 20)
    stands(sqlite, "rebuild-1", "generation-1")
    await goes_on(client, sqlite)


@pytest.mark.parametrize("step", ["replay_chunk", "activate"])
async def test_a_rebuild_whose_run_is_lost_with_temporals_data_ends_as_the_database_says(
    own_server: TemporalServer,
    sqlite: Database,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    monkeypatch.setattr(looking, "_REBUILD_GRACE_MS", 0)
    history(sqlite, range(1, 21))
    client = await Client.connect(own_server.address)
    writer = GatedWriter(sqlite, step, AFTER)
    runs = Runs(client, [])
    events = EventList(connect(redis_url))
    look = Look(writer, events, Hub(), runs, [], lost_after=30, run_grace=12)
    switched = step == "activate"
    with Watch(sqlite, every=0.1).watching():
        async with workers(client, activities_of(writer)):
            await runs.start_rebuild(INPUT)
            await asyncio.wait_for(writer.reached.wait(), 60)
            own_server.kill()
            for file in own_server.home.rglob("temporal.db*"):
                file.unlink()
            own_server.start()
            await asyncio.to_thread(own_server.wait_ready, 30)

            async def ended() -> bool:
                await look.once()
                return rebuild(sqlite, "rebuild-1").state != "RUNNING"

            await eventually(ended, 60, "the look ends the rebuild")
            writer.go.set()
            done = rebuild(sqlite, "rebuild-1")
            if switched:
                assert done.state == "COMPLETED"
            else:
                assert (done.state, done.error) == ("FAILED", "its run is gone")
                assert state(sqlite, "generation-1") == "FAILED"
            assert intake(sqlite) == ("PAUSED", "rebuild-1", "generation-1" if switched else "initial")
            async with asyncio.timeout(120):
                report = await (await runs.start_rebuild(INPUT)).result()
    writer.close()
    events.close()
    assert report["state"] == "COMPLETED"
    assert scalar(sqlite, "SELECT count(*) FROM rebuild_expected") == 0

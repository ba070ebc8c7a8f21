"""Whatever is killed during a rebuild, the saga goes on or ends cleanly, and readers never notice."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

import workflows.rebuild
from contracts import search
from contracts.messages import RebuildInput
from embedded import TemporalServer
from pipeline import look as looking
from pipeline.event_list import EventList, connect
from pipeline.hub import Hub
from pipeline.look import Look
from runs.starts import Runs
from store.audit import audit
from store.engine import Database
from tests.servers import fresh_namespace
from tests.store.rebuilding import everything, generation, history, intake, rebuild, state
from tests.store.scenes import scalar
from tests.waiting import eventually
from tests.workflows.rebuild_victim import SHORT
from tests.workflows.saga import AFTER, BEFORE, STEPS, GatedWriter, Watch, activities_of
from tests.workflows.workers import workers

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
KILLS = [(step, AFTER) for step in STEPS] + [(step, BEFORE) for step in ("begin_rebuild", "replay_chunk", "activate")]
INPUT = RebuildInput(drain_bound=60, phase_bound=60, heartbeat_timeout=2)


async def test_a_rebuild_whose_worker_is_killed_at_any_step_is_carried_on_by_the_next_one(
    temporal_server: TemporalServer,
    sqlite_template: Path,
    tmp_path: Path,
    open_database: Callable[..., Database],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workflows.rebuild, "DATABASE_TIMEOUT", SHORT)
    scenes: list[tuple[Database, Client]] = []
    victims = []
    for number, (step, when) in enumerate(KILLS):
        path = tmp_path / f"{number}.db"
        shutil.copy(sqlite_template, path)
        database = open_database(f"sqlite:///{path}")
        history(database, range(1, 21))
        client = await fresh_namespace(temporal_server)
        await Runs(client, []).start_rebuild(INPUT)
        scenes.append((database, client))
        victims.append([temporal_server.address, client.namespace, f"sqlite:///{path}", step, when])
    before = [(everything(database), generation(database, "initial")) for database, _ in scenes]
    with contextlib.ExitStack() as watching:
        for database, _ in scenes:
            watching.enter_context(Watch(database, every=0.05).watching())
        codes = await asyncio.to_thread(_kill, victims)
        assert codes == [-signal.SIGKILL] * len(KILLS)
        reports = await asyncio.gather(*(_carry_on(database, client) for database, client in scenes))
    for (database, _), report, kill, (untouched, old) in zip(scenes, reports, KILLS, before, strict=True):
        assert (report["state"], report["expected"], report["replayed"]) == ("COMPLETED", 20, 20), kill
        assert intake(database) == ("PAUSED", "rebuild-1", "generation-1"), kill
        assert generation(database, "generation-1").totals == old.totals, kill  # type: ignore[union-attr]
        assert state(database, "initial") == "RETIRED"
        assert everything(database) == untouched, kill
        assert scalar(database, "SELECT count(*) FROM rebuild_expected") == 0, kill
        with database.read() as connection:
            assert audit(connection).breaks == [], kill


def _kill(victims: list[list[str]]) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workflows.rebuild_victim"],
        cwd=ROOT,
        input=json.dumps(victims) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    codes: list[int] = json.loads(done.stdout)
    return codes


async def _carry_on(database: Database, client: Client) -> dict[str, object]:
    writer = GatedWriter(database)
    async with workers(client, activities_of(writer)), asyncio.timeout(60):
        report: dict[str, object] = await client.get_workflow_handle("rebuild/sales").result()
    writer.close()
    return report


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[TemporalServer]:
    """A Temporal server that the test may kill; it knows our search attributes from the start."""
    attributes = {key.name: "Keyword" for key in search.ALL}
    server = TemporalServer(tmp_path / "own", headless=True, search_attributes=attributes)
    server.start()
    server.wait_ready(30)
    yield server
    server.kill()


async def test_a_rebuild_goes_on_when_temporal_is_killed_and_comes_back(
    own_server: TemporalServer, sqlite: Database
) -> None:
    history(sqlite, range(1, 21))
    client = await Client.connect(own_server.address)
    writer = GatedWriter(sqlite, "replay_chunk", AFTER)
    with Watch(sqlite).watching():
        async with workers(client, activities_of(writer)):
            handle = await Runs(client, []).start_rebuild(INPUT)
            await asyncio.wait_for(writer.reached.wait(), 30)
            own_server.kill()
            writer.go.set()
            # The step at hand goes on without the server.
            own_server.start()
            await asyncio.to_thread(own_server.wait_ready, 30)
            async with asyncio.timeout(60):
                report = await handle.result()
    writer.close()
    assert (report["state"], report["replayed"]) == ("COMPLETED", 20)
    assert intake(sqlite)[2] == "generation-1"


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
    with Watch(sqlite).watching():
        async with workers(client, activities_of(writer)):
            await runs.start_rebuild(INPUT)
            await asyncio.wait_for(writer.reached.wait(), 30)
            own_server.kill()
            for file in own_server.home.rglob("temporal.db*"):
                file.unlink()
            own_server.start()
            await asyncio.to_thread(own_server.wait_ready, 30)

            async def ended() -> bool:
                await look.once()
                return rebuild(sqlite, "rebuild-1").state != "RUNNING"

            await eventually(ended, 30, "the look ends the rebuild")
            writer.go.set()
            done = rebuild(sqlite, "rebuild-1")
            if switched:
                assert done.state == "COMPLETED"
            else:
                assert (done.state, done.error) == ("FAILED", "its run is gone")
                assert state(sqlite, "generation-1") == "FAILED"
            assert intake(sqlite) == ("PAUSED", "rebuild-1", "generation-1" if switched else "initial")
            async with asyncio.timeout(60):
                report = await (await runs.start_rebuild(INPUT)).result()
    writer.close()
    events.close()
    assert report["state"] == "COMPLETED"
    assert scalar(sqlite, "SELECT count(*) FROM rebuild_expected") == 0

"""Killed between commit and acknowledgement, called twice, called by two at once: each effect is there once."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.messages import FulfilmentResult
from store.deliveries import record_failure
from store.engine import Database
from store.jobs import begin_job, get_job
from tests.activities.stages import Recorder, Stages, stages
from tests.activities.victim import activity
from tests.store.scenes import append, publish, rows, spread

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
Kill = Callable[[str, str], None]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.activities.victim"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def scene(database: Database, redis_url: str) -> Iterator[Stages]:
    with stages(database, redis_url, Recorder()) as scene:
        yield scene


@pytest.fixture
def kill(nursery: subprocess.Popen[str], database: Database, redis_url: str) -> Kill:
    """`kill(activity, point)`: another worker runs the activity and dies at the point."""

    def live_and_die(name: str, point: str) -> None:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        url = database.url.render_as_string(hide_password=False)
        nursery.stdin.write(json.dumps([url, redis_url, name, point]) + "\n")
        nursery.stdin.flush()
        assert int(nursery.stdout.readline()) == -signal.SIGKILL

    return live_and_die


def prepare(scene: Stages, name: str) -> None:
    """What the activity needs: a job, or the event `a-1`, pending or after its first failure."""
    with scene.database.write() as connection:
        begin_job(connection, "job-1", 100, 1, 1)
    [event, *_] = append(scene.database, "a", 1, 2, 3)
    spread(scene.database, *publish(scene.database))
    if name == "attempt_delivery":
        with scene.database.write() as connection:
            record_failure(connection, "recorder", event.position, attempts=1, error="first", next_attempt_at=1, now=1)


def check(scene: Stages, name: str) -> None:
    """Each effect once, and nothing beside it."""
    with scene.database.read() as connection:
        job = get_job(connection, "job-1")
    if name in ("charge", "ship", *FULFIL):
        assert job.charges == (("job-1", 100),)
        told = ["job-1:payment-captured"] + ["job-1:order-shipped"] * (name != "charge")
        assert rows(scene.database, "SELECT event_id FROM outbox WHERE aggregate_id = 'job/job-1' ORDER BY seq") == [
            (event_id,) for event_id in told
        ]
        assert scene.scalar("SELECT count(*) FROM shipments") == len(job.steps) - 1 == (name != "charge")
    if name in ("end_job", *FULFIL):
        assert job.state == "COMPLETED"
    if name not in ("charge", "ship", "end_job", *FULFIL):
        assert scene.effects() == (["a-1", "a-2", "a-3"] if name == "recorder" else ["a-1"])
        assert scene.states()["a-1"] == "done"


# What is done when the first of its transactions is committed, if that is not all.
DONE_FIRST = {"fulfil by a carrier": "charge"}
FULFIL = ("fulfil", "fulfil by a carrier")
ACTIVITIES = [*FULFIL, "charge", "ship", "end_job", "attempt_delivery", "deliver_by_hand", "recorder"]


@pytest.mark.parametrize("name", ACTIVITIES)
async def test_an_activity_that_was_killed_after_its_commit_runs_again(scene: Stages, kill: Kill, name: str) -> None:
    prepare(scene, name)
    if name == "ship":
        await activity(scene, "charge")
    kill(name, "committed")
    check(scene, DONE_FIRST.get(name, name))
    again = await activity(scene, name)
    check(scene, name)
    if name in ("charge", "ship"):
        assert again == "already_completed"
    if name in FULFIL:
        assert again == FulfilmentResult("already_completed", "completed")
    if name in ("attempt_delivery", "deliver_by_hand"):
        assert again.state == "done"


@pytest.mark.parametrize("name", ACTIVITIES)
async def test_an_activity_that_two_workers_run_at_once_has_its_effect_once(scene: Stages, name: str) -> None:
    prepare(scene, name)
    if name == "ship":
        await activity(scene, "charge")
    with stages(scene.database, "redis://127.0.0.1:1", Recorder()) as twin:
        results = await asyncio.gather(*(activity(one, name) for one in (scene, twin) * 4))
    check(scene, name)
    if name in ("charge", "ship"):
        assert sorted(results) == ["already_completed"] * 7 + ["committed"]
    if name in FULFIL:
        assert sorted(result.charge for result in results) == ["already_completed"] * 7 + ["committed"]
        assert {result.ship for result in results} == {"completed"}
    if name == "recorder":
        assert sum(results) == 3


@pytest.mark.parametrize("point", ["committed together", "answered one"])
async def test_stages_that_were_killed_after_the_commit_that_they_shared_lose_and_double_nothing(
    scene: Stages, kill: Kill, point: str
) -> None:
    prepare(scene, "recorder")
    append(scene.database, "b", 1, 2)
    kill("together", point)
    if scene.database.is_sqlite:
        check(scene, "charge")
        check(scene, "recorder")
    for name in ("together", "together", "ship"):
        await activity(scene, name)
    await scene.drain()
    check(scene, "ship")
    assert scene.effects() == ["a-1", "a-2", "a-3", "b-1", "b-2"]
    assert scene.counts() == {"done": 5}


async def test_a_relay_that_was_killed_between_push_and_mark_makes_a_duplicate_that_is_dropped(
    scene: Stages, kill: Kill
) -> None:
    append(scene.database, "a", 1, 2, 3)
    kill("relay", "pushed")
    assert scene.events.length() == 3
    await scene.relay.step()
    assert [scene.events.count(event_id) for event_id in ("a-1", "a-2", "a-3")] == [2, 2, 2]
    await scene.drain()
    assert scene.events.length() == 0
    assert scene.effects() == ["a-1", "a-2", "a-3"]
    assert scene.counts() == {"done": 3}


@pytest.mark.parametrize("point", ["committed", "removed"])
async def test_a_fan_out_that_was_killed_around_the_removal_loses_and_doubles_nothing(
    scene: Stages, kill: Kill, point: str
) -> None:
    append(scene.database, "a", 1, 2, 3)
    await scene.drain(scene.relay)
    kill("fan_out", point)
    assert scene.events.length() == (3 if point == "committed" else 0)
    assert scene.counts() == {"pending": 3}
    await scene.drain()
    assert scene.events.length() == 0
    assert scene.effects() == ["a-1", "a-2", "a-3"]


async def test_two_drains_of_each_stage_at_once_do_everything_once_and_in_order(scene: Stages, redis_url: str) -> None:
    for aggregate in range(40):
        append(scene.database, f"a{aggregate}", 1, 2, 3, 4, 5)
    receiver = Recorder()
    with stages(scene.database, redis_url, receiver) as zombie:
        twins = (scene, zombie)
        for one in twins:
            for stage in (one.relay, one.fan_out, *one.receivers.values()):
                stage._size.value = 7
        await asyncio.gather(
            *(one.drain(stage) for one in twins for stage in (one.relay, one.fan_out, one.receivers["recorder"]))
        )
        await scene.drain()
    assert scene.counts() == {"done": 200}
    assert len(scene.effects()) == len(set(scene.effects())) == 200
    assert scene.events.length() == 0
    seen: dict[str, list[str]] = {}
    for event_id in dict.fromkeys(receiver.calls):
        seen.setdefault(event_id.split("-")[0], []).append(event_id)
    assert all(ids == sorted(ids) for ids in seen.values())

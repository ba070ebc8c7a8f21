"""The activity that drains a stage: its beats, what it reports to the run, and how it ends."""

from collections.abc import Iterable

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.draining import DrainActivities
from contracts.messages import DrainInput, DrainReport
from pipeline.ahead import Ahead
from pipeline.hub import Hub
from pipeline.stage import Limits, Stage
from store.receivers import Hold
from tests.activities.stages import Scripted

pytestmark = pytest.mark.anyio


async def why_ended(stage: str) -> str | None:
    return "gone was ended by me: a test" if stage == "receiver/gone" else None


async def wake(stages: Iterable[str]) -> None:
    raise AssertionError("nobody is handed work")


def activities_of(stage: Stage, hub: Hub, limits: Limits) -> DrainActivities:
    return DrainActivities([stage], hub, limits, why_ended, Ahead([], hub, 1, wake))


async def test_the_activity_beats_while_it_drains_and_waits_for_a_worker_that_knows_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("activities.draining._BEAT_EVERY", 0.0)
    hub, beats = Hub(), []
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details)
    drains = activities_of(Scripted(2, 3), hub, Limits(0.01, 5))
    assert await environment.run(drains.drain, DrainInput("scripted")) == DrainReport(5, 2, more=False)
    assert beats[:3] == [(0, 0), (2, 1), (5, 2)]
    with pytest.raises(ApplicationError, match="knows no stage receiver/new") as caught:
        await environment.run(drains.drain, DrainInput("receiver/new"))
    assert caught.value.type == "UnknownStage"
    assert not caught.value.non_retryable
    with pytest.raises(ApplicationError, match="gone was ended by me") as caught:
        await environment.run(drains.drain, DrainInput("receiver/gone"))
    assert (caught.value.type, caught.value.non_retryable) == ("ReceiverEnded", True)


async def test_a_drain_that_waits_does_not_beat_at_each_of_its_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[tuple[int, int]] = []
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details)
    waiting = Scripted()
    await environment.run(activities_of(waiting, Hub(), Limits(0.3, 5)).drain, DrainInput("scripted"))
    assert waiting.steps > 5
    assert beats == []
    monkeypatch.setattr("activities.draining._BEAT_EVERY", 0.1)
    await environment.run(activities_of(Scripted(2), Hub(), Limits(0.3, 5)).drain, DrainInput("scripted"))
    assert 1 <= len(beats) <= 3
    assert set(beats) == {(2, 1)}


async def test_a_hold_that_the_run_does_not_know_of_ends_the_drain_and_one_that_it_knows_does_not() -> None:
    stage = Scripted(1)
    stage.hold = Hold(7, "down")
    drains = activities_of(stage, Hub(), Limits(0.05, 5))
    report = await ActivityEnvironment().run(drains.drain, DrainInput("scripted"))
    assert report == DrainReport(1, 1, more=True, held_since=7, reason="down")  # after a batch: it gets on in any case
    for known in (8, None):
        report = await ActivityEnvironment().run(drains.drain, DrainInput("scripted", known))
        assert report.more
    report = await ActivityEnvironment().run(drains.drain, DrainInput("scripted", 7))
    assert not report.more
    stage.hold = None
    report = await ActivityEnvironment().run(drains.drain, DrainInput("scripted", 7))
    assert report == DrainReport(0, 0, more=True)


async def test_an_error_in_a_stage_ends_the_drain_and_says_so_to_temporal() -> None:
    class Broken(Scripted):
        async def step(self) -> int:
            raise ConnectionError("Redis does not answer")

    hub = Hub()
    drains = activities_of(Broken(), hub, Limits(0.01, 5))
    with pytest.raises(ConnectionError):
        await ActivityEnvironment().run(drains.drain, DrainInput("scripted"))
    assert not hub.is_draining("scripted")

"""kill -9 of workers in the middle of their transactions, many at a time, and what carries on after them."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType, TimeoutType
from temporalio.client import Client, WorkflowHandle

from embedded import TemporalServer
from pipeline.writer import Writer
from store.engine import Database
from tests.workflows.victim import AT_ONCE, every_activity
from tests.workflows.workers import workers
from workflows.policies import ALIVE

_ROOT = Path(__file__).resolve().parents[2]
_AT_ONCE = 6


@dataclass
class Scene:
    """A run, and the transaction of its database before or after whose commit a worker dies."""

    step: str
    when: str
    client: Client
    database: Database
    handle: WorkflowHandle[Any, Any]


async def kill_workers(server: TemporalServer, scenes: Sequence[Scene]) -> None:
    """For each scene a worker in a process of its own, until all of them have died."""
    victims = [
        [
            server.address,
            scene.client.namespace,
            scene.database.url.render_as_string(hide_password=False),
            scene.step,
            scene.when,
        ]
        for scene in scenes
    ]

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.workflows.victim"],
            cwd=_ROOT,
            input=json.dumps(victims) + "\n",
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            check=True,
        ).stdout

    codes = json.loads(await asyncio.to_thread(run))
    alive = [(scene.step, scene.when) for scene, code in zip(scenes, codes, strict=True) if code != -signal.SIGKILL]
    assert not alive, f"these were never reached: {alive}"


async def carry_on(scenes: Sequence[Scene]) -> list[Any]:
    """What each run comes to with a new worker; an exception where it failed."""
    few = asyncio.Semaphore(_AT_ONCE)

    async def one(scene: Scene) -> Any:
        writer = Writer(scene.database)
        async with few, workers(scene.client, every_activity(writer)), asyncio.timeout(120):
            try:
                return await scene.handle.result()
            finally:
                await _taken_over(scene)
                writer.close()

    return await asyncio.gather(*map(one, scenes), return_exceptions=True)


async def _taken_over(scene: Scene) -> None:
    """The dead worker was missed by its beats, in one activity of the run, and not by the time-out of its work."""
    missed = []
    for event in (await scene.handle.fetch_history()).events:
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            assert event.activity_task_scheduled_event_attributes.heartbeat_timeout.ToTimedelta() == ALIVE
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
            failure = event.activity_task_started_event_attributes.last_failure
            if failure.HasField("timeout_failure_info"):
                missed.append(failure.timeout_failure_info.timeout_type)
    expected = [] if scene.step in AT_ONCE else [TimeoutType.TIMEOUT_TYPE_HEARTBEAT]
    assert missed == expected, (scene.step, scene.when, missed)

"""Recorded runs replay on the workflows of today: a change that would break runs under way fails here."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay.hasty import Hasty
from worker import WORKFLOWS, sandbox

HISTORIES = sorted(Path(__file__).with_name("histories").glob("*.json"))
# Recorded before a workflow was changed on purpose, and kept: such runs may be under way.
EARLIER = sorted(Path(__file__).with_name("histories").glob("earlier/*.json"))
CASES = {
    "delivery-by-hand",
    "delivery-by-hand-failed",
    "delivery-dead",
    "delivery-retried",
    "fan-out-continued-as-new",
    "fan-out-running",
    "fulfilment-completed",
    "fulfilment-failed",
    "fulfilment-resumed",
    "rebuild-cancelled",
    "rebuild-completed",
    "receiver-continued-as-new",
    "receiver-running",
    "redrive-completed",
    "relay-continued-as-new",
    "relay-running",
    "relay-safety-timer",
}


def history(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json("recorded", path.read_text())


def replay(path: Path, *workflows: type) -> None:
    # Its own loop: a replay needs no server and no client.
    replayer = Replayer(workflows=workflows, workflow_runner=sandbox())
    asyncio.run(replayer.replay_workflow(history(path)))


def test_every_case_is_recorded() -> None:
    assert {path.stem for path in EARLIER} == {"fulfilment-failed-at-once"}
    assert {path.stem for path in HISTORIES} == CASES
    recorded = {
        history(path).events[0].workflow_execution_started_event_attributes.workflow_type.name for path in HISTORIES
    }
    assert recorded == {each.__name__ for each in WORKFLOWS}


@pytest.mark.parametrize("path", HISTORIES + EARLIER, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_a_recorded_run_replays(path: Path) -> None:
    replay(path, *WORKFLOWS)


def test_a_workflow_that_changed_its_steps_is_caught() -> None:
    [path] = [path for path in HISTORIES if path.stem == "delivery-retried"]
    with pytest.raises(workflow.NondeterminismError):
        replay(path, Hasty)


@pytest.mark.parametrize("path", HISTORIES + EARLIER, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_a_recording_names_no_machine(path: Path) -> None:
    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for inner in value.values() for text in strings(inner)]
        if isinstance(value, list):
            return [text for inner in value for text in strings(inner)]
        return [value] if isinstance(value, str) else []

    document = json.loads(path.read_text())
    assert {event.get("identity", "worker") for event in document["events"]} <= {"worker"}
    for text in strings(document):
        assert not re.match(r"\d+@", text), text
        assert not re.search(r"(^|[\s\"'])/\w+/\w+", text), text
        assert "Traceback" not in text

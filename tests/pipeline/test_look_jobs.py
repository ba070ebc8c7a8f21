"""The look and jobs: which run is the one that was asked for. The Temporal side is a fake that knows one run."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from contracts.messages import DeliveryInput, FulfilmentInput
from pipeline.hub import Hub
from pipeline.look import Look
from pipeline.writer import Writer
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from store.jobs import JOB_LOOK_MS, begin_job, end_job, get_job

MINUTE = 60_000


@dataclass
class Run:
    """What Temporal knows of the job's newest run; `closed` in UTC ms."""

    status: WorkflowExecutionStatus
    closed: int | None = None

    @property
    def close_time(self) -> datetime | None:
        return None if self.closed is None else datetime.fromtimestamp(self.closed / 1000, UTC)


@dataclass
class FakeRuns:
    run: Run | None = None
    started: list[FulfilmentInput] = field(default_factory=list)

    @property
    def client(self) -> Any:
        return self

    def get_workflow_handle(self, workflow_id: str) -> Any:
        assert workflow_id == "job/job-1"
        return self

    async def describe(self) -> Run:
        if self.run is None:
            raise RPCError("no such run", RPCStatusCode.NOT_FOUND, b"")
        return self.run

    async def start_delivery(self, message: DeliveryInput) -> None:
        raise AssertionError("no event fails here")

    async def start_job(self, message: FulfilmentInput) -> None:
        self.started.append(message)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'saisei.db'}")
    with opened.write() as connection:
        initialize(connection, now_ms())
    yield opened
    opened.close()


def looked(database: Database, run: Run | None, asked_at: int) -> tuple[list[FulfilmentInput], str, str | None]:
    """What the look starts for a job asked for at `asked_at`, and the job's state and error afterwards."""
    with database.write() as connection:
        begin_job(connection, "job-1", 100, asked_at, asked_at + JOB_LOOK_MS)
    runs, writer = FakeRuns(run), Writer(database)
    look: Any = Look(writer, Mock(), Hub(), runs, [], lost_after=30, run_grace=12)  # type: ignore[arg-type]

    async def look_for_jobs() -> None:
        await look._jobs(await look._database())

    asyncio.run(look_for_jobs())
    writer.close()
    with database.read() as connection:
        job = get_job(connection, "job-1")
    return runs.started, job.state, job.error


def test_a_job_without_a_run_gets_one(database: Database) -> None:
    asked_at = now_ms() - MINUTE
    assert looked(database, None, asked_at) == ([FulfilmentInput("job-1", 100)], "RUNNING", None)


def test_a_run_that_had_ended_before_the_job_was_asked_for_again_is_followed_by_a_new_one(database: Database) -> None:
    asked_at = now_ms() - MINUTE
    with database.write() as connection:
        begin_job(connection, "job-1", 100, asked_at - MINUTE, asked_at)
        end_job(connection, "job-1", "ship failed")
    older = Run(WorkflowExecutionStatus.FAILED, asked_at - 1000)
    assert looked(database, older, asked_at) == ([FulfilmentInput("job-1", 100)], "RUNNING", None)


def test_a_run_that_goes_on_is_left_alone(database: Database) -> None:
    assert looked(database, Run(WorkflowExecutionStatus.RUNNING), now_ms() - MINUTE) == ([], "RUNNING", None)


def test_a_run_that_completed_since_completes_the_job(database: Database) -> None:
    asked_at = now_ms() - MINUTE
    since = Run(WorkflowExecutionStatus.COMPLETED, asked_at + 1000)
    assert looked(database, since, asked_at) == ([], "COMPLETED", None)


def test_a_run_that_somebody_terminated_is_not_started_again(database: Database) -> None:
    asked_at = now_ms() - MINUTE
    started, state, error = looked(database, Run(WorkflowExecutionStatus.TERMINATED, asked_at + 1000), asked_at)
    assert (started, state) == ([], "FAILED")
    assert error == "its run was terminated; `job run job-1` resumes it"


def test_a_job_that_was_just_asked_for_is_left_to_its_caller(database: Database) -> None:
    assert looked(database, None, now_ms()) == ([], "RUNNING", None)

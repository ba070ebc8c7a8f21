"""`job run` and `job show` on a running stack."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from embedded import Stack
from store.engine import Database
from tests.commands.cli import Cli, ended
from tests.commands.conftest import Inside
from tests.waiting import wait_until


@contextmanager
def stopped_worker(stack: Stack) -> Iterator[None]:
    worker = stack.pids["worker"]
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def test_a_job_that_failed_to_ship_is_resumed_and_charged_once(cli: Cli) -> None:
    failed = cli("job", "run", "job-1", "--ship-fails")
    assert (failed.exit_code, failed.lines) == (1, ["charge=committed", "ship=failed"])
    assert "`job run job-1` resumes it" in failed.stderr
    shown = cli.json("job", "show", "job-1")
    assert (shown["state"], shown["steps"]) == ("FAILED", ["charge"])

    resumed = cli("job", "run", "job-1")
    assert (resumed.exit_code, resumed.lines) == (0, ["charge=already_completed", "ship=completed"])
    again = cli.json("job", "run", "job-1")
    assert (again["charge"], again["ship"]) == ("already_completed", "completed")
    shown = cli.json("job", "show", "job-1")
    assert (shown["state"], shown["steps"]) == ("COMPLETED", ["charge", "ship"])
    assert shown["charges"] == [{"job": "job-1", "amount": 100}]
    assert shown["link"].endswith("/workflows/job%2Fjob-1")

    cli("job", "run", "job-1", "--amount", "101").refused("with amount 100, not 101; nothing was changed")
    assert cli.json("job", "show", "job-1") == shown


def test_two_runs_at_once_charge_once(cli: Cli, database: Database) -> None:
    both = [cli.start("job", "run", "job-2", "--json") for _ in range(2)]
    results = [ended(process) for process in both]
    assert [result.exit_code for result in results] == [0, 0]
    assert {result.json["ship"] for result in results} == {"completed"}
    with database.read() as connection:
        charges = connection.exec_driver_sql("SELECT amount FROM charges WHERE job_id = 'job-2'").all()
    assert [tuple(row) for row in charges] == [(100,)]


def test_a_command_that_waits_says_for_what_and_may_be_interrupted(cli: Cli, stack: Stack) -> None:
    with stopped_worker(stack):
        waiting = cli.start("job", "run", "job-3")
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "job/job-3: waits for a worker; `make up` starts one\n"
        result = ended(waiting, interrupt=True)
        assert result.exit_code == 130
        assert result.stderr.splitlines() == ["job/job-3: goes on without this command", "starter.py: interrupted"]
        cli("job", "run", "job-3", "--ship-fails").refused("has a run that is open")
        assert cli("job", "run", "job-3", "--no-wait").lines == ["job job-3 has a run already"]
        assert cli.json("status")["worker"] == "does not answer"
        attached = cli.start("job", "run", "job-3")
        assert attached.stderr is not None
        assert attached.stderr.readline() == "job job-3 has a run already; waiting for it\n"
    # A worker that stood still may do a step again: it then finds the charge that it made.
    charge, ship = ended(attached).stdout.splitlines()
    assert charge in ("charge=committed", "charge=already_completed")
    assert ship == "ship=completed"
    assert cli.json("job", "show", "job-3")["charges"] == [{"job": "job-3", "amount": 100}]


def test_a_job_is_recorded_while_temporal_is_away(cli: Cli, stack: Stack) -> None:
    away = {"TEMPORAL_ADDRESS": "127.0.0.1:1"}
    cli("job", "run", "job-4", env=away).refused(
        "nothing is lost, it goes on once Temporal is back: Temporal at 127.0.0.1:1 does not answer; "
    )
    assert cli.json("job", "show", "job-4")["state"] == "RUNNING"
    # Who asks for no outcome has all that was asked for once it is durable, as with an order.
    again = cli("job", "run", "job-4", "--no-wait", env=away)
    assert (again.exit_code, again.lines) == (0, ["job job-4 is recorded"])
    assert again.stderr.startswith("nothing is lost, it goes on once Temporal is back: ")
    assert cli("job", "run", "job-4", "--no-wait").lines == ["job job-4 is started"]
    wait_until(lambda: cli.json("job", "show", "job-4")["state"] == "COMPLETED", 60, "the job is completed")


def test_a_job_needs_a_usable_id_and_amount(cli: Cli, inside: Inside) -> None:
    inside(cli, "job", "run", "").refused("JOB: must not be empty")
    inside(cli, "job", "run", "j", "--amount", "0").refused("amount: must be from 1")

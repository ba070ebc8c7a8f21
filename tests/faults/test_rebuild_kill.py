"""kill -9 of the worker, or of the command line, in the middle of a rebuild of real processes."""

import signal
from pathlib import Path

import pytest

from bench.history import RANDOM, fill
from tests.faults.oracle import audited, drained, record
from tests.faults.rig import Rig, seconds_until
from tests.waiting import wait_until

_PHASES = (
    "waiting until drained",
    "fixing the expected set",
    "replaying",
    "reconciling",
    "reconciling the sealed generation",
    "activating",
    "activated",
)
_ORDERS = 100_000
_IN_PHASE = "SELECT count(*) FROM rebuilds WHERE rebuild_id = :id AND phase = :phase"
_COMPLETED = "SELECT count(*) FROM rebuilds WHERE state = 'COMPLETED'"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_killed_at_every_phase_of_a_rebuild_leaves_a_clean_audit(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        fill(rig.database, _ORDERS, RANDOM)
        with rig.database.write() as connection:  # the drill's receivers came after that history
            since = "UPDATE subscriptions SET since_position = ? WHERE receiver LIKE 'drill-%'"
            connection.exec_driver_sql(since, (_ORDERS,))
        rig.start_worker()
        for number, phase in enumerate(_PHASES, 1):
            if phase == "waiting until drained":
                rig.kill("valkey")
                record(rig, "late", 1)
            command = rig.command("rebuild", "--wait", "--json")
            wait_until(lambda n=number, p=phase: rig.number(_IN_PHASE, id=f"rebuild-{n}", phase=p), 60, f"{phase}")
            rig.kill("worker")
            found = rig.query("SELECT phase, state FROM rebuilds WHERE rebuild_id = :id", id=f"rebuild-{number}")
            audited(rig)
            if phase == "waiting until drained":
                rig.restart("valkey")
            rig.start_worker()
            took = seconds_until(lambda n=number: rig.number(_COMPLETED) == n, 90, f"{phase}: completed\n{rig.logs()}")
            command.communicate(timeout=120)
            assert command.returncode == 0
            print(f"killed while {tuple(found[0])}: completed {took:.1f} s after the next worker's start")
            audited(rig, by_command=True)
        drained(rig)
        left = "SELECT count(*) FROM rebuild_expected"
        seconds_until(lambda: rig.number(left) == 0, 60, "the expected sets are gone")
        audited(rig, by_command=True)


def test_a_command_line_killed_while_it_waits_leaves_the_rebuild_running(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        record(rig, "first", 30)
        drained(rig)
        rig.kill("valkey")  # nothing drains, so the rebuild waits
        record(rig, "second", 1)
        command = rig.command("rebuild", "--wait")
        running = "SELECT count(*) FROM rebuilds WHERE state = 'RUNNING'"
        wait_until(lambda: rig.number(running), 60, "the rebuild runs")
        command.send_signal(signal.SIGKILL)
        command.communicate(timeout=60)
        assert command.returncode == -signal.SIGKILL
        assert rig.run("execution")["state"] == "RUNNING"
        assert "runs already" in rig.run("rebuild", "--wait", code=1)
        rig.restart("valkey")
        seconds_until(lambda: rig.number(running) == 0, 60, f"the rebuild is over\n{rig.logs()}")
        done = rig.run("execution")
        assert (done["state"], done["expected"], done["replayed"]) == ("COMPLETED", 31, 31)
        again = rig.run("rebuild", "--wait", "--resume")
        assert (again["rebuild"], again["state"]) == ("rebuild-2", "COMPLETED")
        drained(rig)
        audited(rig, by_command=True)

"""The guard: nothing outlives the parent, what dies is started again, no stranger is touched."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import embedded
from embedded import AlreadyRunning, Child, EmbeddedError, ValkeyServer, _state
from embedded._process import birth_of
from embedded._state import READY, Note, Process, hold_lock, note_path, write_note
from embedded.tied import tie
from tests.embedded.processes import kill_and_wait, parent_with_stack, processes_of
from tests.embedded.test_servers import redis_client
from tests.waiting import wait_until

VALKEY = ("valkey",)
SLEEPER = [sys.executable, "-c", "print('at work', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home on which nothing is left at the end, whatever the test did."""
    folder = tmp_path / "home"
    yield folder
    embedded.stop(folder)
    wait_until(lambda: not processes_of(folder), 60, f"no process on {folder}")


def nothing_runs_on(home: Path) -> None:
    wait_until(lambda: not processes_of(home), 60, f"no process on {home}")


def test_both_servers_start_answer_and_end_with_the_stack(home: Path) -> None:
    attributes = {"Receiver": "Keyword"}
    with embedded.start(home, search_attributes=attributes) as stack:
        assert set(stack.pids) == {"temporal", "valkey"}
        assert stack.attached
        found = embedded.find(home)
        assert found is not None
        assert not found.attached
        assert found.temporal_address == stack.temporal_address
        assert found.ui_url == stack.ui_url
        env = stack.environment({"TEMPORAL_API_KEY": "other", "PATH": "kept"})
        assert env["TEMPORAL_ADDRESS"] == stack.temporal_address
        assert env["REDIS_URL"] == stack.redis_url
        assert "TEMPORAL_API_KEY" not in env
        assert env["PATH"] == "kept"
        assert stack.redis_url is not None
        with redis_client(stack.redis_url) as client:
            assert client.ping()
    assert embedded.find(home) is None
    assert not note_path(home).exists()
    assert not processes_of(home)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_parent_leaves_no_process(home: Path, number: signal.Signals) -> None:
    with parent_with_stack(home, "temporal,valkey") as (parent, guard):
        assert len(processes_of(home)) >= 3
        # To the whole group, as a terminal does with Ctrl-C.
        os.killpg(parent.pid, number)
        parent.wait(60)
        nothing_runs_on(home)
        wait_until(lambda: birth_of(guard) is None, 60, "the guard is gone")


def test_the_end_of_the_parent_is_seen_though_a_fork_holds_its_pipe(home: Path) -> None:
    program = (
        "import os, sys, time, embedded\n"
        "embedded.start(sys.argv[1], services=['valkey'])\n"
        "if os.fork() == 0: time.sleep(600)\n"
        "else: print('ready', flush=True); time.sleep(600)\n"
    )
    parent = tie(
        subprocess.Popen(
            [sys.executable, "-c", program, str(home)],
            stdout=subprocess.PIPE,
            cwd=Path(embedded.__file__).parents[1],
            start_new_session=True,
        )
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    guard = embedded.find(home)
    assert guard is not None
    parent.kill()
    parent.wait()
    wait_until(lambda: embedded.find(home) is None, 60, "the guard stops")
    os.killpg(parent.pid, signal.SIGKILL)
    parent.stdout.close()


def test_a_killed_server_is_started_again_with_its_data_and_port(home: Path) -> None:
    with embedded.start(home, services=VALKEY) as stack:
        assert stack.redis_url is not None
        with redis_client(stack.redis_url) as client:
            for number in range(100):
                client.rpush("list", number)
        before = stack.pids["valkey"]
        kill_and_wait(before)
        wait_until(lambda: stack.pids.get("valkey", before) != before, 60, "a new server")

        def pushed() -> int:
            try:
                with redis_client(str(stack.redis_url)) as client:
                    return int(client.llen("list"))
            except redis.exceptions.ConnectionError:
                return 0

        assert wait_until(pushed, 60, "it answers") == 100


def test_children_get_the_addresses_a_log_and_a_restart(home: Path) -> None:
    program = (
        "import os; print('at', os.environ['REDIS_URL'], os.environ['SAISEI_HOME'], "
        "os.environ['COLOUR'], os.getcwd(), flush=True); import time; time.sleep(600)"
    )
    child = Child("worker", [sys.executable, "-c", program], {"COLOUR": "blue"}, ready_line="at ")
    with embedded.start(home, services=VALKEY, children=[child]) as stack:
        said = (home / "logs" / "worker.log").read_text()
        assert said == f"at {stack.redis_url} {home} blue {os.getcwd()}\n"
        before = stack.pids["worker"]
        kill_and_wait(before)
        wait_until(lambda: stack.pids.get("worker", before) != before, 60, "a new worker")
    assert birth_of(before) is None


def test_a_child_that_ends_at_once_keeps_the_stack_from_starting(home: Path) -> None:
    child = Child("worker", [sys.executable, "-c", "exit('no such table')"], ready_line="ready")
    with pytest.raises(EmbeddedError, match=r"worker ended with exit code 1 .*: no such table"):
        embedded.start(home, services=VALKEY, children=[child])
    assert not processes_of(home)


def test_a_child_that_dies_again_and_again_runs_once_its_cause_has_passed(home: Path) -> None:
    program = "import os, sys, time; os.path.exists(sys.argv[1]) or sys.exit('no'); time.sleep(600)"
    cause = home / "needed"
    child = Child("worker", [sys.executable, "-S", "-c", program, str(cause)])
    with embedded.start(home, services=VALKEY, children=[child]) as stack:
        wait_until(lambda: stack.failing == ["worker"], 60, "the worker is called failing")
        assert "valkey" in stack.pids
        assert "4 times in a row" in (home / "logs" / "guard.log").read_text()
        cause.touch()
        wait_until(lambda: "worker" in stack.pids, 60, "the worker runs")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_ends_during_the_start_leaves_no_process(home: Path, number: signal.Signals) -> None:
    program = "import sys, embedded; embedded.start(sys.argv[1])"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(home)],
        cwd=Path(embedded.__file__).parents[1],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: (home / "logs" / "valkey.log").exists(), 60, "the servers are starting")
    os.killpg(parent.pid, number)
    parent.wait(60)
    nothing_runs_on(home)


def test_a_second_start_is_refused_and_harms_nothing(home: Path) -> None:
    with embedded.start(home, services=VALKEY) as stack:
        with pytest.raises(AlreadyRunning, match="running already"):
            embedded.start(home, services=VALKEY)
        assert embedded.find(home) is not None
        with redis_client(str(stack.redis_url)) as client:
            assert client.ping()


def test_a_start_right_after_a_stop_waits_for_the_old_guard(home: Path) -> None:
    with parent_with_stack(home, "valkey") as (parent, _):
        parent.kill()
        parent.wait()
    with embedded.start(home, services=VALKEY) as stack:
        assert stack.pids


def test_a_guard_that_has_forgotten_its_note_is_waited_for_until_it_lets_go(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, noted = threading.Semaphore(0), _state.read_note

    def look(at: Path) -> Note | None:
        looks.release()
        return noted(at)

    monkeypatch.setattr(_state, "_MOMENT", 0.0)
    monkeypatch.setattr(_state, "read_note", look)
    old, had = hold_lock(home), []
    thread = threading.Thread(target=lambda: had.append(hold_lock(home)))
    thread.start()
    for _ in range(3):
        assert looks.acquire(timeout=60)
    os.close(old)
    thread.join(60)
    assert len(had) == 1
    os.close(had[0])


def test_after_kill_9_of_the_guard_a_start_takes_over_with_data_and_ports(home: Path) -> None:
    first = embedded.start(home, services=VALKEY)
    with redis_client(str(first.redis_url)) as client:
        client.rpush("list", "kept")
    kill_and_wait(first.guard_pid)
    assert embedded.find(home) is None
    with embedded.start(home, services=VALKEY) as second:
        assert second.redis_url == first.redis_url
        with redis_client(str(second.redis_url)) as client:
            assert client.lrange("list", 0, -1) == ["kept"]
    first.close()


def note_of_a_dead_guard(home: Path, **processes: Process) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (home / "run").mkdir(parents=True, exist_ok=True)
    write_note(home, Note(READY, Process(gone.pid, "long ago"), True, processes))


def test_servers_left_by_a_dead_guard_are_stopped_first(home: Path) -> None:
    left = ValkeyServer(home)
    # A server of a thread is not tied to its parent: so it is on macOS after kill -9 of a guard.
    thread = threading.Thread(target=left.start)
    thread.start()
    thread.join()
    try:
        left.wait_ready(60)
        assert left.pid is not None
        birth = birth_of(left.pid)
        assert birth is not None
        note_of_a_dead_guard(home, valkey=Process(left.pid, birth))
        with embedded.start(home, services=VALKEY) as stack:
            assert not left.process.running
            assert stack.redis_url == left.url
    finally:
        left.kill()


def test_a_recycled_pid_and_a_foreign_home_are_never_touched(home: Path) -> None:
    recycled = tie(subprocess.Popen([*SLEEPER, str(home)]))
    foreign = tie(subprocess.Popen(SLEEPER))
    try:
        birth = birth_of(foreign.pid)
        assert birth is not None
        note_of_a_dead_guard(
            home,
            valkey=Process(recycled.pid, "another birth"),
            temporal=Process(foreign.pid, birth),
        )
        with embedded.start(home, services=VALKEY):
            assert recycled.poll() is None
            assert foreign.poll() is None
    finally:
        for process in (recycled, foreign):
            process.kill()
            process.wait()


def test_a_kept_stack_outlives_its_parent_until_it_is_stopped(home: Path) -> None:
    program = (
        "import sys, embedded\nstack = embedded.start(sys.argv[1], services=['valkey'])\nstack.keep()\nstack.close()\n"
    )
    root = Path(embedded.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, str(home)], check=True, cwd=root, timeout=120)
    found = embedded.find(home)
    assert found is not None
    with redis_client(str(found.redis_url)) as client:
        assert client.ping()
    with found:
        pass  # somebody else's stack is not stopped by looking at it
    assert embedded.find(home) is not None
    assert embedded.stop(home)
    assert not processes_of(home)
    assert not embedded.stop(home)


def test_a_detached_stack_is_stopped_by_its_home(home: Path) -> None:
    stack = embedded.start(home, services=VALKEY, detached=True)
    assert not stack.attached
    assert embedded.stop(home)
    assert not processes_of(home)


def test_a_port_asked_for_that_is_taken_gives_one_sentence(home: Path, tmp_path: Path) -> None:
    other = ValkeyServer(tmp_path / "other")
    other.start()
    other.wait_ready(60)
    try:
        port = int(other.url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(EmbeddedError, match=f"^Port {port} for valkey .* is taken"):
            embedded.start(home, services=VALKEY, redis_port=port)
    finally:
        other.kill()


def test_a_home_that_cannot_be_written_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match=r"cannot be written .* set SAISEI_HOME"):
        embedded.start(tmp_path / "file")

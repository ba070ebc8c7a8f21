"""A test run that is killed leaves no process behind: at each place where tests start some."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.embedded.processes import ROOT, processes_of
from tests.waiting import wait_until

# Each starts something on the home that it is given, and says the pid.
PLACES = {
    "plain": """
import subprocess
from embedded.tied import tie
child = tie(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", home]))
say(child.pid)
""",
    "stopped": """
import os, signal, subprocess
from embedded.tied import tie
child = tie(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", home]))
os.kill(child.pid, signal.SIGSTOP)
say(child.pid)
""",
    "with a child": """
import subprocess
from embedded.tied import tie
program = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]);"
    "print(1, flush=True); time.sleep(600)"
)
child = tie(subprocess.Popen([sys.executable, "-c", program, home], stdout=subprocess.PIPE, start_new_session=True))
child.stdout.readline()
say(child.pid)
""",
    "api": """
from tests.http.server import Api
say(Api(Path(home)).process.pid)
""",
    "worker": """
from tests.faults.rig import Rig
with Rig(Path(home)) as rig:
    say(rig.start_worker().pid)
""",
    "command": """
from tests.commands.cli import Cli
say(Cli(Path(home)).start("lab", "outbox", "--dir", home).pid)
""",
    "bench": """
from bench.stack import scratch
with scratch() as stack, stack.worker() as worker:
    say(worker.pid)
""",
}
PARENT = """
import sys, time
from pathlib import Path
home = sys.argv[1]
def say(pid):
    print(pid, flush=True)
    time.sleep(600)
"""


@contextmanager
def parent_of(place: str, home: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process that stands for the test run, and the pid of what it started."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + PLACES[place], str(home)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(home)},
    )
    try:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize("place", PLACES)
def test_what_a_killed_test_run_started_ends(place: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with parent_of(place, home) as (parent, pid):
        assert psutil.Process(pid).is_running()
        os.killpg(parent.pid, signal.SIGKILL)  # all of its group, as a terminal or a CI system does
        parent.wait()
        wait_until(lambda: not psutil.pid_exists(pid), 60, "it is gone")
        wait_until(lambda: not processes_of(home), 60, "nothing runs on that home")


def test_what_ends_before_its_parent_is_let_alone_and_the_reaper_goes_with_the_parent() -> None:
    program = (
        "import subprocess, sys, embedded.tied as tied\n"
        "for _ in range(3): tied.tie(subprocess.Popen([sys.executable, '-c', ''])).wait()\n"
        "print(tied._reaper.pid)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not psutil.pid_exists(int(done.stdout))

"""The pipeline in real processes, each of which a drill may kill, stop or start again.

The servers run without a guard: nobody but the drill restarts anything. When the drill's own process is killed, the
servers are ended by the kernel on Linux, workers and commands by what they are tied with; otherwise all of them by the
end of the block, which also proves that nothing is left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from temporalio.client import Client

from contracts import search
from embedded import TemporalServer, ValkeyServer
from embedded.tied import tie
from receivers.registry import RECEIVERS
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from store.receivers import register_receiver
from tests.embedded.processes import processes_of
from tests.faults.receivers import DRILL_RECEIVERS, make_tables
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Short waits, so that a drill shows a recovery and not a time-out. The real ones are five times longer and more.
SHORT = {
    "SAISEI_BUSY": "0.9",
    "SAISEI_HEARTBEAT": "3",
    "SAISEI_LEASE": "3",
    "SAISEI_LOST_AFTER": "2",
    "SAISEI_IDLE": "0.5",
    "SAISEI_BACKOFF": "0.5",
}


class WorkerProcess:
    """One `worker.py` in a process of its own."""

    def __init__(self, rig: "Rig", number: int, settings: dict[str, str]) -> None:
        self.log = rig.home / "logs" / f"worker-{number}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = tie(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.drill_worker"],
                    cwd=ROOT,
                    env=rig.environment | settings,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, timeout: float = 60.0) -> Self:
        def ready() -> bool:
            assert self.exit_code is None, f"the worker ended with {self.exit_code}:\n{self.output()[-3000:]}"
            return "worker ready" in self.output()

        wait_until(ready, timeout, "the worker is ready")
        return self

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def terminate(self, timeout: float) -> float:
        """SIGTERM; how many seconds it took to end."""
        asked = time.monotonic()
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout:g} s of SIGTERM:\n{self.output()[-3000:]}") from None
        return time.monotonic() - asked


class Rig:
    """Both servers, the database and any number of workers on one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        attributes = dict(search.START_DEV)
        self.temporal = TemporalServer(home, headless=True, search_attributes=attributes)
        self.valkey = ValkeyServer(home)
        self.database = Database(f"sqlite:///{home / 'saisei.db'}", busy_timeout=5)
        self.workers: list[WorkerProcess] = []
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        for server in (self.temporal, self.valkey):
            server.start()
        for server in (self.temporal, self.valkey):
            server.wait_ready()
        with self.database.write() as connection:
            initialize(connection, now_ms())
            make_tables(connection)
            for receiver in (*RECEIVERS, *DRILL_RECEIVERS):
                register_receiver(connection, receiver.name, receiver.event_types)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TEMPORAL_", "SAISEI_"))}
        self.environment = inherited | {
            "SAISEI_HOME": str(self.home),
            "DATABASE_URL": f"sqlite:///{self.home / 'saisei.db'}",
            "TEMPORAL_ADDRESS": self.temporal.address,
            "REDIS_URL": self.valkey.url,
            **SHORT,
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.kill()
        self.temporal.kill()
        self.valkey.kill()
        self.database.close()
        left = processes_of(self.home)
        assert not left, f"left behind: {left}"

    def start_worker(self, **settings: str) -> WorkerProcess:
        """Start one more worker and wait until it works."""
        worker = WorkerProcess(self, len(self.workers), settings)
        self.workers.append(worker)
        return worker.wait_ready()

    def kill(self, what: str) -> None:
        """SIGKILL `worker` (all of them), `valkey` or `temporal`."""
        if what == "worker":
            for worker in self.workers:
                worker.kill()
        else:
            {"valkey": self.valkey, "temporal": self.temporal}[what].kill()

    def restart(self, what: str) -> None:
        """Start again on the same data what `kill` ended."""
        if what == "worker":
            self.start_worker()
        else:
            server = {"valkey": self.valkey, "temporal": self.temporal}[what]
            server.start()
            server.wait_ready()

    def empty_temporal(self) -> None:
        """Kill Temporal, delete all its data, and start it again on the same port."""
        self.temporal.kill()
        shutil.rmtree(self.home / "temporal")
        self.temporal.start()
        self.temporal.wait_ready()

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command of `starter.py` on this home, which goes on while the drill does something else."""
        return tie(
            subprocess.Popen(
                [sys.executable, str(ROOT / "starter.py"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.environment | {"TEMPORAL_CONFIG_FILE": os.devnull},
                cwd=ROOT,
            )
        )

    def run(self, *arguments: str, timeout: float = 120.0, code: int = 0) -> Any:
        """The JSON document of a command that ends with `code`."""
        process = self.command(*arguments, "--json")
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == code, f"{arguments} ended with {process.returncode}:\n{stdout}\n{stderr}"
        return json.loads(stdout) if stdout else stderr

    def query(self, statement: str, **values: Any) -> list[Any]:
        """Rows of one snapshot."""
        with self.database.read() as connection:
            return list(connection.execute(sa.text(statement), values))

    def number(self, statement: str, **values: Any) -> int:
        """The one number that the statement gives."""
        return int(self.query(statement, **values)[0][0])

    async def connect(self) -> Client:
        """A client that connects when it is first used, so also while Temporal is down."""
        return await Client.connect(self.temporal.address, lazy=True)

    def logs(self) -> str:
        """The ends of the workers' logs, for a failure."""
        return "\n".join(f"--- {worker.log.name}\n{worker.output()[-2500:]}" for worker in self.workers)


def seconds_until(predicate: Callable[[], Any], timeout: float, description: str) -> float:
    """`wait_until`, and how long it took."""
    started = time.monotonic()
    wait_until(predicate, timeout, description)
    return time.monotonic() - started

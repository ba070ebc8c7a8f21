"""DBOS on SQLite: a workflow an event, and a workflow a job of two steps, on threads of one process.

`python -m bench.peers.on_dbos COUNT AT_ONCE` prints the seconds of as many jobs. It begins once a line comes.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS, DBOSConfig

from bench.peers import work

AT_ONCE = 50

config: DBOSConfig = {
    "name": "peer",
    "system_database_url": f"sqlite:///{os.environ[work.DATABASE]}.dbos",
    "log_level": "ERROR",
    "run_admin_server": False,
}
DBOS(config=config)


@DBOS.step()
def deliver_step(event_id: str) -> None:
    """The transaction of one event."""
    work.deliver(event_id)


@DBOS.workflow()
def deliver(event_id: str) -> None:
    """One event at every receiver."""
    deliver_step(event_id)


@DBOS.step()
def charge(job: str) -> None:
    """The first step."""
    work.charge(job)


@DBOS.step()
def ship(job: str) -> None:
    """The second step."""
    work.ship(job)


@DBOS.workflow()
def fulfil(job: str) -> None:
    """One job."""
    charge(job)
    ship(job)


def run_job(job: str) -> None:
    """From its row to its end."""
    work.begin(job)
    fulfil(job)


def send() -> None:
    """Deliver each recorded event once a line comes."""
    _run(deliver, work.pending(), AT_ONCE)


def _run(one: Callable[[str], None], names: Sequence[str], at_once: int) -> None:
    DBOS.launch()
    with ThreadPoolExecutor(at_once) as threads:
        work.say_ready()
        input()
        started = time.monotonic()
        list(threads.map(one, names))
        print(time.monotonic() - started, flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    _run(run_job, [f"peer-{number}" for number in range(int(sys.argv[1]))], int(sys.argv[2]))

"""DBOS on SQLite: a workflow an event, and a workflow a job of two steps, on threads of one process.

`python -m bench.peers.on_dbos events` delivers what is recorded; `jobs COUNT AT_ONCE` prints the seconds of as many
jobs. Each begins once a line comes.
"""

import os
import sys
import time
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


def main(what: str, count: int = 0, at_once: int = AT_ONCE) -> None:
    """Launch, then work once a line comes."""
    DBOS.launch()
    events = work.pending()
    with ThreadPoolExecutor(at_once) as threads:
        print("ready", flush=True)
        input()
        started = time.monotonic()
        if what == "events":
            list(threads.map(deliver, events))
        else:
            list(threads.map(run_job, [f"peer-{what}-{at_once}-{number}" for number in range(count)]))
        print(time.monotonic() - started, flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

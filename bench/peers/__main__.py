"""Saisei beside Celery, huey and DBOS on the same work, in turn. `python -m bench.peers PYTHON [--json]`.

PYTHON is the interpreter of the virtual environment that the peers are in (`make bench-peers` makes it). Each system
gets as many orders as keep it busy for some seconds, on a new database and the same Valkey; then the audit must find
every effect once. Jobs: on DBOS and on Saisei, a worker in the same process each. DBOS keeps its own state in an
SQLite file beside the database, with the settings that it chooses: synchronous=FULL, as ours, and a rollback journal.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from temporalio.client import Client

from bench.__main__ import show
from bench.drain import drain_once
from bench.jobs import AT_ONCE, job, require_jobs, timed, worker_in_process
from bench.peers import work
from bench.report import Row, median, row
from bench.stack import ROOT, Scratch, order_ids, record, require_clean, scratch, wait_for
from config import end
from contracts.errors import SaiseiError
from embedded.tied import tie
from store.engine import Database

_ORDERS, _PEER_ORDERS = 50_000, 1000
_JOBS, _ALONE = 300, 60
_RUNS = 3


def run(python: str, share: float) -> list[Row]:
    """The ratios; `share` of the work that `make bench-peers` does."""
    orders, few, jobs, alone = (max(1, int(n * share)) for n in (_ORDERS, _PEER_ORDERS, _JOBS, _ALONE))
    rates: dict[str, list[float]] = {}
    with scratch() as stack:
        systems: dict[str, Callable[[], float]] = {
            "saisei": lambda: orders / drain_once(stack, order_ids(orders)),
            "Celery": lambda: _events(stack, python, few, "on_celery", _CELERY),
            "huey": lambda: _events(stack, python, few, "on_huey", _HUEY),
            "DBOS": lambda: _events(stack, python, few, "on_dbos", None),
            "saisei, 50 at once": lambda: asyncio.run(_our_jobs(stack, jobs, AT_ONCE)),
            "DBOS, 50 at once": lambda: _dbos_jobs(stack, python, jobs, AT_ONCE),
            "saisei, one at a time": lambda: asyncio.run(_our_jobs(stack, alone, 1)),
            "DBOS, one at a time": lambda: _dbos_jobs(stack, python, alone, 1),
        }
        for _ in range(_RUNS):
            for name, measure in systems.items():
                rates.setdefault(name, []).append(measure())
    rate = {name: median(each) for name, each in rates.items()}
    best = max(("Celery", "huey", "DBOS"), key=rate.__getitem__)
    rows = [row(f"drain beside {name}", rate["saisei"], "events/s", floor=rate[name]) for name in _PEERS]
    rows.append(
        row(f"drain beside the best ({best})", rate["saisei"], "events/s", floor=rate[best], least=30, by="ratio")
    )
    for how, least in (("50 at once", 0.7), ("one at a time", 0.5)):
        ours, floor = rate[f"saisei, {how}"], rate[f"DBOS, {how}"]
        rows.append(row(f"jobs beside DBOS, {how}", ours, "jobs/s", floor=floor, least=least, by="ratio"))
    return rows


_PEERS = ("Celery", "huey", "DBOS")


@dataclass(frozen=True)
class _Consumer:
    """A program that works tasks off. It says `ready` so many times before all of its processes wait for work."""

    arguments: tuple[str, ...]
    says_ready: int


_CELERY = _Consumer(
    ("-m", "celery", "-A", "bench.peers.on_celery", "worker", "-c", "2", "--without-gossip", "--without-mingle"), 1
)
_HUEY = _Consumer(
    ("-m", "huey.bin.huey_consumer", "bench.peers.on_huey.huey", "-w", "2", "-k", "process", "-d", "0.01"), 2
)


def _events(stack: Scratch, python: str, count: int, program: str, consumer: _Consumer | None) -> float:
    """Events a second, from the word that starts them until all have their effects."""
    with stack.another_database() as database, contextlib.ExitStack() as processes:
        record(database, order_ids(count))
        if consumer is not None:
            started_consumer = processes.enter_context(_process(stack, database, [python, *consumer.arguments]))
            for _ in range(consumer.says_ready):
                _await_ready(started_consumer)
        # Imported, not run: both sides must know the task by the same module's name.
        send = f"from bench.peers import {program}; {program}.send()"
        sender = processes.enter_context(_process(stack, database, [python, "-c", send]))
        started = _go(sender)
        wait_for(lambda: _done(database) >= count, 0.01)
        seconds = time.monotonic() - started
        require_clean(database, count)
    return count / seconds


def _dbos_jobs(stack: Scratch, python: str, count: int, at_once: int) -> float:
    with stack.another_database() as database:
        arguments = [python, "-m", "bench.peers.on_dbos", str(count), str(at_once)]
        with _process(stack, database, arguments) as process:
            _go(process)
            assert process.stdout is not None
            seconds = float(process.stdout.readline())
        require_jobs(database, count)
    return count / seconds


async def _our_jobs(stack: Scratch, count: int, at_once: int) -> float:
    client = await Client.connect(stack.temporal_address)
    with stack.another_database() as database:
        async with worker_in_process(stack, client, database) as worker:
            rate = await timed(job(worker), count, at_once)
        require_jobs(database, count)
    return rate


def _done(database: Database) -> int:
    with database.read() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM mail_messages").scalar_one())


@contextlib.contextmanager
def _process(stack: Scratch, database: Database, arguments: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    with (stack.home / "peer.log").open("ab") as log:
        process = tie(
            subprocess.Popen(
                arguments,
                cwd=ROOT,
                env={**os.environ, work.DATABASE: str(database.url.database), work.REDIS: stack.redis_url},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _await_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()).strip() != "ready":
        if not line:
            raise SaiseiError(f"a peer ended with exit code {process.wait()} before its work; is it installed?")


def _go(process: "subprocess.Popen[str]") -> float:
    """Let it begin; when it did."""
    assert process.stdin is not None
    _await_ready(process)
    started = time.monotonic()
    process.stdin.write("go\n")
    process.stdin.flush()
    return started


def main() -> int:
    """Print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", metavar="PYTHON", help="the interpreter that has Celery, huey and DBOS")
    parser.add_argument("--share", type=float, default=1.0, help="of the work that `make bench-peers` does")
    parser.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        rows = run(args.python, args.share)
    except SaiseiError as error:
        print(f"bench peers: {error}", file=sys.stderr)
        return 1
    words = (__doc__ or "").splitlines()[0]
    show("peers", words, rows, time.monotonic() - started, as_json=args.json)
    return 0


if __name__ == "__main__":
    end(main())

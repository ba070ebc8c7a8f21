"""Worker processes that die by SIGKILL in the middle of a rebuild, right before or after a transaction.

Run as `python -m tests.workflows.rebuild_victim`: it reads one JSON line, a list of [Temporal's address, namespace,
database URL, transaction, "before" or "after"], forks a worker for each, and prints their exit codes when all have
died. Everything is imported once, so a victim costs a fork.
"""

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta

from temporalio.client import Client

import workflows.rebuild
from store.engine import Database
from tests.workflows.saga import GatedWriter, activities_of
from tests.workflows.workers import workers

# A dead worker's transaction is given to the next one after this long; in production it is half a minute.
SHORT = timedelta(seconds=3)


async def _live(address: str, namespace: str, url: str, step: str, when: str) -> None:
    client = await Client.connect(address, namespace=namespace)
    writer = GatedWriter(Database(url), step, when)
    # Nothing cached: the server need not wait for a dead worker's memory of the run.
    async with workers(client, activities_of(writer), max_cached_workflows=0):
        await asyncio.wait_for(writer.reached.wait(), 60)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    workflows.rebuild.DATABASE_TIMEOUT = SHORT
    children = []
    for victim in json.loads(sys.stdin.readline()):
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(_live(*victim))
            finally:
                os._exit(1)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()

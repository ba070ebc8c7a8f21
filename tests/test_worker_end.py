"""A worker whose server never answers ends all the same, and so does the process around it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import asyncio

import worker

class Deaf:
    async def shutdown(self):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

class Quick:
    async def shutdown(self):
        await asyncio.sleep(0)

async def main():
    assert await worker.end_workers([])
    assert await worker.end_workers([Quick(), Quick()])
    assert not await worker.end_workers([Deaf(), Quick()], longest=0.1)
    print("left")

asyncio.run(main())
print("ended", flush=True)
worker.end(0)
"""


def test_a_worker_that_does_not_end_is_left_behind_and_keeps_no_event_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["left", "ended"]), done.stderr

"""How a process ends: also with a server that never answers, and without taking the interpreter down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import asyncio

import worker
from config import end

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
end(0)
"""


def test_a_worker_that_does_not_end_is_left_behind_and_keeps_no_event_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["left", "ended"]), done.stderr


ENDS = """
import atexit, runpy, sys

atexit.register(print, "taken down")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("arguments", [["worker.py"], ["api.py"], ["starter.py", "status"]], ids=" ".join)
def test_no_program_takes_the_interpreter_down(tmp_path: Path, arguments: list[str]) -> None:
    """A thread of Temporal's client that comes back meanwhile would abort it, after all its work was done."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"SAISEI_HOME": str(tmp_path), "DATABASE_URL": "mysql://nowhere", "REDIS_URL": "redis://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr

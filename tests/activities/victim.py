"""A process that forks victims: each does one piece of work and is killed by SIGKILL at a point of the test's choice.

Run as `python -m tests.activities.victim`; it reads one JSON line a victim and answers with the signal or exit code.
Everything is imported once, so a victim costs a fork.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from temporalio.testing import ActivityEnvironment

from activities.delivering import DeliveryActivities
from activities.fulfilment import FulfilmentActivities, OwnPayments, OwnShipping
from contracts.messages import DeliveryInput, StepInput
from pipeline.event_list import EventList
from pipeline.writer import Writer, _Piece
from store.engine import Database
from tests.activities.stages import Recorder, Stages
from tests.waiting import eventually


def killing(target: type, method: str, *, call: int = 1) -> None:
    """From here on the process dies right after the `call`th return of the method, before anybody hears of it."""
    original = getattr(target, method)
    left = call

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def synchronous(*args: Any) -> Any:
        result = original(*args)
        die()
        return result

    async def asynchronous(*args: Any) -> Any:
        result = await original(*args)
        die()
        return result

    setattr(target, method, asynchronous if asyncio.iscoroutinefunction(original) else synchronous)


def dying_after_commit(call: int) -> None:
    """From here on the process dies right after the `call`th write transaction."""
    original = Database.write
    left = call

    @contextmanager
    def write(self: Database) -> Iterator[Connection]:
        nonlocal left
        with original(self) as connection:
            yield connection
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    Database.write = write  # type: ignore[method-assign]


class Carrier(OwnShipping):
    """Somebody outside, who is asked and says nothing."""

    def request(self, key: str) -> None:
        """The goods are on their way."""


async def _settled(receiver: str) -> None:
    pass


async def activity(scene: Stages, name: str) -> Any:
    """What a worker would run for an activity of that name."""
    shipping = Carrier() if name == "fulfil by a carrier" else OwnShipping()
    own = FulfilmentActivities(scene.writer, OwnPayments(), shipping)
    delivering = DeliveryActivities(
        scene.writer, {"recorder": Recorder()}, scene.hub, retry=scene.retry, settled=_settled
    )
    run = ActivityEnvironment().run
    match name:
        case "fulfil" | "fulfil by a carrier":
            return await run(own.fulfil, StepInput("job-1", 100))
        case "charge":
            return await run(own.charge, StepInput("job-1", 100))
        case "ship":
            return await run(own.ship, StepInput("job-1", 100))
        case "end_job":
            return await run(own.end_job, "job-1", None)
        case "attempt_delivery":
            return await run(delivering.attempt_delivery, DeliveryInput("recorder", "a-1", "a"))
        case "deliver_by_hand":
            return await run(delivering.deliver_by_hand, DeliveryInput("recorder", "a-1", "a", manual=True))
        case "relay" | "fan_out":
            return await getattr(scene, name).step()
        case "recorder":
            return await scene.receivers["recorder"].step()
        case "together":
            if scene.database.is_sqlite:
                scene.writer._joinable = 60  # also on a machine that is busy
            with scene.database.write():  # on SQLite all of them wait for it, and then share a transaction
                tasks = [asyncio.create_task(activity(scene, one)) for one in ("charge", "recorder", "relay")]
                writing = scene.writer._waiting
                await eventually(lambda: len(writing) + sum(task.done() for task in tasks) == 3, 60, "all wait")
            return await asyncio.gather(*tasks)
    raise ValueError(name)


POINTS: dict[str, Callable[[], None]] = {
    "committed": lambda: killing(Writer, "write"),
    "committed together": lambda: dying_after_commit(2),  # the first one is what they waited for
    "answered one": lambda: killing(_Piece, "conclude"),
    "pushed": lambda: killing(EventList, "push"),
    "removed": lambda: killing(EventList, "remove"),
    "never": lambda: None,
}


def _live(database_url: str, redis_url: str, name: str, point: str) -> None:
    scene = Stages(Database(database_url), redis_url, [Recorder()])
    POINTS[point]()
    asyncio.run(activity(scene, name))


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _live(*json.loads(line))
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

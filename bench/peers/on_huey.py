"""huey: a task an event over the same Valkey, worker processes."""

import os

from huey import RedisHuey

from bench.peers import work

huey = RedisHuey("peer", url=os.environ[work.REDIS], results=False)


@huey.on_startup()
def announce() -> None:
    """Called in each worker process once it waits for work."""
    work.say_ready()


@huey.task()
def deliver(event_id: str) -> None:
    """One event at every receiver."""
    work.deliver(event_id)


def send() -> None:
    """Send a task for each recorded event once a line comes."""
    events = work.pending()
    huey.pending_count()  # connects
    work.say_ready()
    input()
    for event_id in events:
        deliver(event_id)

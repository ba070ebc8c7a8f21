"""Celery: a task an event over the same Valkey, prefork."""

import os

from celery import Celery
from celery.signals import worker_ready

from bench.peers import work

app = Celery("peer", broker=os.environ[work.REDIS])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,  # as durable as it gets: a task of a killed worker comes back
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    worker_redirect_stdouts=False,
)


@worker_ready.connect
def announce(**_: object) -> None:
    """The processes have started and wait for work."""
    work.say_ready()


@app.task
def deliver(event_id: str) -> None:
    """One event at every receiver."""
    work.deliver(event_id)


def send() -> None:
    """Send a task for each recorded event once a line comes."""
    events = work.pending()
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        connection.ensure_connection(max_retries=3)
        work.say_ready()
        input()
        for event_id in events:
            deliver.apply_async((event_id,), producer=producer)

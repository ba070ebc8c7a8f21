"""Killed between commit and acknowledgement, or before the commit: the same call again, and nothing is there twice."""

from collections.abc import Iterator

import pytest

from store.engine import Database
from tests.store.processes import Script
from tests.store.scenes import append, publish, register, rows, scalar, spread

_CALLER = """
import os, signal, sys, traceback
from contracts.names import CHARGE, SHIP
from contracts.orders import Order
from receivers.builtin import Billing, Mail, Sales
from store.control import clear_lease, hold_lease, initialize
from store.deliveries import *
from store.engine import Database
from store.fanout import fan_out
from store.jobs import *
from store.orders import place_order
from store.outbox import *
from store.receivers import lock_receiver, register_receiver

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def take(connection, receiver):
    lock_receiver(connection, receiver.name)
    events = next_batch(connection, receiver.name, 100)
    receiver.deliver_batch(connection, events)
    mark_done(connection, receiver.name, [event.position for event in events])

def charge(connection):
    begin_job(connection, "job-1", 100, 1, 1)
    if CHARGE not in completed_steps(connection, "job-1"):
        write_charge(connection, "job-1", 100, 2)
        complete_charge(connection, "job-1", 100, 2)

def ship(connection):
    charge(connection)
    if SHIP not in completed_steps(connection, "job-1"):
        write_shipment(connection, "job-1", 3)
        complete_ship(connection, "job-1", 3)

def relay(connection):
    mark_published(connection, [position for position, _ in pending_events(connection, 100)], 5)

def fail(connection):
    delivery = load_delivery(connection, "billing", "a-1")
    record_failure(connection, "billing", delivery.event.position, attempts=1, error="x", next_attempt_at=9, now=1)

def run(url, death, call):
    database = Database(url)
    with database.write() as connection:
        exec(call, globals() | {"connection": connection})
        if death == "before":
            die()
    if death == "after":
        die()

# The imports are done once; each call runs in a fork of this process, which has one thread and no connection.
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            run(*line.rstrip().split("\t"))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

CALLS = {
    "intake": "place_order(connection, Order('order-1', 's', 1, 100, 'JPY'), 1)",
    "relay": "relay(connection)",
    "fan-out": "fan_out(connection, [b'a-1', b'a-2', b'junk'], 5)",
    "billing": "take(connection, Billing())",
    "mail": "take(connection, Mail())",
    "sales": "take(connection, Sales())",
    "failure": "fail(connection)",
    "claim": "claim_runs(connection, 'mail', 1, now=5, overdue=0)",
    "charge": "charge(connection)",
    "ship": "ship(connection)",
    "publish again": "publish_again(connection, 'a-2')",
    "register": "register_receiver(connection, 'late', ['t'])",
    "lease": "hold_lease(connection, 500)",
    "rest": "clear_lease(connection)",
    "init": "initialize(connection, 77)",
}


@pytest.fixture(scope="module")
def caller() -> Iterator[Script]:
    with Script(_CALLER) as script:
        yield script


def _call(caller: Script, database: Database, name: str, death: str) -> int:
    """Makes the call in a process of its own, which is killed before or after its commit; its exit code."""
    caller.say("\t".join((database.url.render_as_string(hide_password=False), death, CALLS[name])))
    return int(caller.line())


def _content(database: Database) -> dict[str, list[tuple[object, ...]]]:
    tables = (
        "orders", "outbox", "deliveries", "subscriptions", "jobs", "job_steps", "charges", "shipments",
        "billing_entries",
        "mail_messages", "sales_applied", "sales_totals", "control", "generations", "invalid_entries",
    )  # fmt: skip
    return {table: sorted(rows(database, f"SELECT * FROM {table}"), key=repr) for table in tables}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_killed_and_made_again_is_as_one_call(database: Database, caller: Script, name: str) -> None:
    register(database, "billing", "mail", "sales")
    append(database, "a", 1, 2)
    spread(database, *publish(database))
    append(database, "b", 1)
    empty = _content(database)
    assert _call(caller, database, name, "before") == -9
    assert _content(database) == empty
    assert _call(caller, database, name, "after") == -9
    once = _content(database)
    assert _call(caller, database, name, "never") == 0
    assert _content(database) == once


def test_a_push_that_is_killed_before_its_mark_is_only_a_duplicate(database: Database) -> None:
    register(database, "mail")
    append(database, "a", 1, 2)
    pushed: list[str] = []
    with database.read() as connection:  # the relay reads and pushes; its mark is lost with it
        pushed += [row[0] for row in connection.exec_driver_sql("SELECT event_id FROM outbox ORDER BY position")]
    pushed += publish(database)
    assert pushed == ["a-1", "a-2"] * 2
    assert (spread(database, *pushed[:3]).events, spread(database, *pushed[3:]).events) == (2, 0)
    assert scalar(database, "SELECT count(*) FROM deliveries") == 2

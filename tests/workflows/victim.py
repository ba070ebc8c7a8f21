"""Worker processes that die by SIGKILL inside a transaction, or right after it.

Run as `python -m tests.workflows.victim`: it reads one JSON line, a list of [Temporal's address, namespace, database
URL, transaction, "before" or "after" its commit], forks a worker for each, a few at a time, and prints their exit codes
when all have died. Everything is imported once, so a victim costs a fork.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection
from temporalio.client import Client
from temporalio.worker._worker import load_default_build_id

from activities.delivering import DeliveryActivities
from activities.fulfilment import FulfilmentActivities, OwnPayments, OwnShipping, PaymentSide, ShippingSide
from activities.redriving import RedriveActivities
from pipeline.failure import RetryPolicy
from pipeline.hub import Hub
from pipeline.writer import Writer
from receivers.builtin import Sales
from store.engine import Database
from tests.workflows.saga import AFTER, BEFORE, activities_of, step_of
from tests.workflows.workers import workers

T = TypeVar("T")

_AT_ONCE = 6
_PATIENCE = 60.0  # seconds; who lives longer never came to its transaction


class DyingWriter(Writer):
    """A Writer in whose transaction of that name the process dies: before its commit, with all its statements done, or
    after it, before anybody hears of it."""

    def __init__(self, database: Database, step: str, when: str) -> None:
        super().__init__(database)
        self._last = (step, when)

    # `write` comes by here too.
    async def timed_write(self, work: Callable[[Connection], T], *, patience: float = 0.0) -> tuple[T, float]:
        result = await super().timed_write(self._deadly(work), patience=patience)
        self._die_at(work, AFTER)
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        result = await super().read(self._deadly(work))
        self._die_at(work, AFTER)
        return result

    def _deadly(self, work: Callable[[Connection], T]) -> Callable[[Connection], T]:
        def inside(connection: Connection) -> T:
            result = work(connection)
            self._die_at(work, BEFORE)
            return result

        return inside

    def _die_at(self, work: Callable[..., Any], when: str) -> None:
        if (step_of(work), when) == self._last:
            die()


class OnceBroke(OwnPayments):
    """Fails once, so that the charge is left to an activity of its own."""

    broke = False

    def request(self, key: str, amount: int) -> None:
        if not self.broke:
            self.broke = True
            raise ConnectionError("the bank is closed for a moment")


class OnceLate(OwnShipping):
    """As OnceBroke, for shipping."""

    late = False

    def request(self, key: str) -> None:
        if not self.late:
            self.late = True
            raise ConnectionError("the lorry is late")


class Carrier(OwnShipping):
    """Is asked, so that the charge is recorded by itself."""

    def request(self, key: str) -> None:
        """The goods are on their way."""


# What a worker does in one activity, by the transaction in which it dies, and who ships there.
AT_ONCE: dict[str, tuple[str, type[OwnShipping]]] = {
    "fulfil": ("_record_both", OwnShipping),
    "fulfil, charging": ("_record_charge", Carrier),
    "fulfil, shipping": ("_record_shipment", Carrier),
}


def die() -> NoReturn:
    """This process is gone; nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def every_activity(
    writer: Writer, payments: PaymentSide | None = None, shipping: ShippingSide | None = None
) -> list[Callable[..., Any]]:
    """All that a worker runs but drains."""

    async def nobody(_: Any) -> None:
        """Nobody rests here who could be woken."""

    jobs = FulfilmentActivities(writer, payments or OwnPayments(), shipping or OwnShipping())
    deliveries = DeliveryActivities(writer, {"sales": Sales()}, Hub(), retry=RetryPolicy(5, 1.0), settled=nobody)
    redrives = RedriveActivities(writer, nobody)
    return [
        *activities_of(writer),
        jobs.fulfil,
        jobs.charge,
        jobs.ship,
        jobs.end_job,
        deliveries.attempt_delivery,
        deliveries.deliver_by_hand,
        redrives.redrive_chunk,
        redrives.cancel_redrive,
    ]


async def _live(address: str, namespace: str, url: str, step: str, when: str) -> None:
    client = await Client.connect(address, namespace=namespace)
    database = Database(url)
    if step in AT_ONCE:
        transaction, carrier = AT_ONCE[step]
        writer = DyingWriter(database, transaction, when)
        activities = every_activity(writer, shipping=carrier())
    else:
        writer = DyingWriter(database, step, when)
        activities = every_activity(writer, OnceBroke(), OnceLate())
    async with workers(client, activities):
        await asyncio.sleep(_PATIENCE)


def main() -> None:
    load_default_build_id()  # it reads all modules, here once and not in every victim
    victims = json.loads(sys.stdin.readline())
    for _, _, url, _, _ in victims[:1]:  # the driver too
        sa.make_url(url).get_dialect().import_dbapi()
    living: dict[int, int] = {}
    codes: dict[int, int] = {}
    for number, victim in enumerate(victims):
        if len(living) == _AT_ONCE:
            _bury(living, codes)
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(_live(*victim))
            finally:
                os._exit(1)
        living[pid] = number
    while living:
        _bury(living, codes)
    print(json.dumps([codes[number] for number in range(len(victims))]), flush=True)


def _bury(living: dict[int, int], codes: dict[int, int]) -> None:
    pid, status = os.wait()
    codes[living.pop(pid)] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()

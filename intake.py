"""Intake: place an order, and wake the pipeline if it is cold. Used by the command line and the HTTP API."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from contracts.orders import Order
from store.clock import now_ms
from store.dialect import is_infrastructure_error
from store.engine import Database
from store.orders import PlacedOrder, place_new_orders, place_order, place_orders

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 2.0  # seconds that an order's answer waits for its wake
# Between two wakes, in seconds. A drain stays for longer than the first after it was woken, so orders that follow
# within it are seen; without a bound, every order placed while no worker runs would add signals to each run.
_PAUSE, _PAUSE_AFTER_FAILURE = 1.0, 5.0


class Intake:
    """Places orders in one database; `wake` tells the pipeline."""

    def __init__(self, database: Database, wake: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._wake = wake
        self._silent_until = 0.0
        self._heard = True

    def place(self, order: Order) -> PlacedOrder:
        """Write the order and its event. Durable when it returns; call `wake_if_cold` with the result then.

        Raises Conflict, IntakePaused, StoreBusy.
        """
        answer = self.place_all(lambda: [order])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def place_all(self, take: Callable[[], Sequence[Order]]) -> list[PlacedOrder | Exception]:
        """Several in one transaction, which costs one wait for the disk; each has its own answer, or what `place`
        would raise for it. Durable when it returns. Raises StoreBusy, and what else concerns them all.

        `take` says which, once the transaction is open: who comes while it waits for the lock goes along.
        """
        orders: Sequence[Order] | None = None
        for place in (place_new_orders, place_orders):
            try:
                with self._database.write() as connection:
                    orders = take() if orders is None else orders
                    return [*place(connection, orders, now_ms())] if orders else []
            except Exception as error:
                if orders is None or is_infrastructure_error(error):
                    raise
        assert orders is not None
        # One of them is refused by the database itself, and nothing of the others is kept. One by one only that one
        # fails; in the order of their ids, so that two transactions cannot wait for each other's orders.
        with self._database.write() as connection:
            answers = {
                number: _kept(connection, partial(place_order, connection, orders[number], now_ms()))
                for number in sorted(range(len(orders)), key=lambda number: orders[number].id)
            }
            return [answers[number] for number in range(len(orders))]

    async def wake_if_cold(self, placed: PlacedOrder) -> bool:
        """Wake the pipeline unless it drains already or was woken a moment ago. A wake that fails or hangs never fails
        the order: the worker's look finds it. Whether the pipeline is awake, as far as we know."""
        if not placed.cold:
            return True
        if time.monotonic() < self._silent_until:
            return self._heard
        self._silent_until = time.monotonic() + _PAUSE
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._wake()
        except Exception as error:
            logger.debug("the wake failed (%s); the worker's look finds the order", error)
            self._heard = False
            self._silent_until = time.monotonic() + _PAUSE_AFTER_FAILURE
        else:
            self._heard = True
        return self._heard


def _kept(connection: Connection, work: Callable[[], T]) -> T | Exception:
    """What `work` writes is kept, unless it raises: then nothing of it is, and the error is returned. Raises what
    concerns the transaction as a whole."""
    try:
        with connection.begin_nested():
            return work()
    except Exception as error:
        if is_infrastructure_error(error):
            raise
        return error

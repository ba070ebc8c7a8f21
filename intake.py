"""Intake: place an order, and wake the pipeline if it is cold. Used by the command line and the HTTP API."""

import logging
from collections.abc import Awaitable, Callable

from contracts.orders import Order
from store.clock import now_ms
from store.engine import Database
from store.orders import PlacedOrder, place_order

logger = logging.getLogger(__name__)


class Intake:
    """Places orders in one database; `wake` tells the pipeline."""

    def __init__(self, database: Database, wake: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._wake = wake

    def place(self, order: Order) -> PlacedOrder:
        """Write the order and its event. Durable when it returns; call `wake_if_cold` with the result then.

        Raises Conflict, IntakePaused, StoreBusy.
        """
        with self._database.write() as connection:
            return place_order(connection, order, now_ms())

    async def wake_if_cold(self, placed: PlacedOrder) -> bool:
        """Wake the pipeline unless it drains already. A failing wake never fails the order: the worker's look finds
        it. Whether the pipeline is awake, as far as we know."""
        if not placed.cold:
            return True
        try:
            await self._wake()
        except Exception as error:
            logger.debug("the wake failed (%s); the worker's look finds the order", error)
            return False
        return True

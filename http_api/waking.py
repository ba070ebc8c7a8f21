"""Waking the pipeline behind the answers: orders only leave a note here, one task sends what is due.

However many orders find the pipeline cold at once, they come to one wake, and to one more for those that came while
it was sent (it may have been too early for them). Temporal may be down at any time: the task keeps trying, and the
worker's look finds the orders in any case.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from temporalio.client import Client

from config import Settings
from receivers.registry import by_name
from runs.connect import connect
from runs.starts import Runs

logger = logging.getLogger("saisei.api")

# The relay needs about this long to take its lease, and until then every order still finds it cold.
_PAUSE = 0.1
_FIRST_RETRY, _LONGEST_RETRY = 0.5, 15.0
_LAST_CHANCE = 2.0  # for a wake that is still due when the API stops


class Waker:
    """`wake` returns at once. Used as an asynchronous context manager, which owns the task behind it."""

    def __init__(self, settings: Settings, address: Callable[[], str | None]) -> None:
        """`address` names the Temporal server whenever a connection is made: the embedded one may have moved."""
        self._settings = settings
        self._address = address
        self._due = asyncio.Event()
        self._runs: Runs | None = None
        self._connecting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def wake(self) -> None:
        """The pipeline has something to do: it is told soon, and once for all who say so meanwhile."""
        self._due.set()

    async def client(self) -> Client:
        """The client in use. Raises Unreachable when there is none and none can be had."""
        return (await self._connected()).client

    async def __aenter__(self) -> "Waker":
        self._task = asyncio.create_task(self._keep_waking())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._due.is_set():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_LAST_CHANCE):
                    await (await self._connected()).wake()

    async def _keep_waking(self) -> None:
        retry = _FIRST_RETRY
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await (await self._connected()).wake()
            except asyncio.CancelledError:
                self._due.set()  # for the last chance
                raise
            except Exception as error:
                if retry == _FIRST_RETRY:  # once, not for as long as it lasts
                    logger.warning("the pipeline cannot be woken (%s); orders are taken all the same", error)
                self._runs = None  # the next try asks for the address again
                self._due.set()
                await asyncio.sleep(retry)
                retry = min(2 * retry, _LONGEST_RETRY)
                continue
            if retry != _FIRST_RETRY:
                logger.info("the pipeline can be woken again")
                retry = _FIRST_RETRY
            await asyncio.sleep(_PAUSE)

    async def _connected(self) -> Runs:
        async with self._connecting:
            if self._runs is None:
                client = await connect(await asyncio.to_thread(self._address), "api")
                self._runs = Runs(client, tuple(by_name()), self._settings.timings)
            return self._runs

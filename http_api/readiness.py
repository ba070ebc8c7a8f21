"""What `/readyz` tells of each server. Only the database decides: with Redis or Temporal down orders are taken all the
same, and turning callers away then would make of a delay a loss. Both are reported for whoever watches.

A server that answers and takes no writes is of no use to an order. Nothing is written to find that out, as long as
all is well: the database is asked what the last order came to, Redis whether it would take a push.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from contracts.errors import Refused
from http_api.orders_desk import OrdersDesk
from http_api.waking import Waker
from pipeline import event_list
from pipeline.event_list import EventList
from store.control import read_control

_PATIENCE = 2.0  # seconds for each answer
_SILENT, _REFUSES = "does not answer", "answers and takes no writes"
_MEANWHILE = "orders are taken all the same and flow once it is back"


@dataclass(frozen=True)
class Check:
    """Whether one server answers, and one sentence."""

    ok: bool
    detail: str

    def document(self) -> dict[str, Any]:
        """The check as JSON shows it."""
        return {"ok": self.ok, "detail": self.detail}


class _Probe:
    """Asks one server. A question that hangs is waited for by all who ask meanwhile, so that a server that is stopped
    does not collect one thread for each look at it."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    async def check(self, meanwhile: str) -> Check:
        """What it found; `meanwhile`: what follows from it when it is not well."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._quietly())
        done, _ = await asyncio.wait([self._asking], timeout=_PATIENCE)
        trouble = self._trouble if done and not self._asking.cancelled() else _SILENT
        return Check(True, "answers") if trouble is None else Check(False, f"{trouble}; {meanwhile}")

    async def _quietly(self) -> None:
        self._trouble: str | None = _SILENT
        try:
            await self._ask()
        except Refused:
            self._trouble = _REFUSES
        except Exception:
            return
        else:
            self._trouble = None


class Readiness:
    """The checks of `/readyz`."""

    def __init__(self, desk: OrdersDesk, waker: Waker, redis_url: Callable[[], str | None]) -> None:
        """`redis_url` names the Redis server whenever it is asked, as it may have moved."""
        self._redis_url = redis_url
        self._desk = desk
        self._waker = waker
        self._database = _Probe(self._ask_database)
        self._redis = _Probe(self._ask_redis)
        self._temporal = _Probe(self._ask_temporal)

    async def checks(self) -> dict[str, Check]:
        """Each server by name, all asked at once and within about two seconds."""
        database, redis, temporal = await asyncio.gather(
            self._database.check("no order can be taken"),
            self._redis.check(_MEANWHILE),
            self._temporal.check(_MEANWHILE),
        )
        return {"database": database, "redis": redis, "temporal": temporal}

    async def _ask_database(self) -> None:
        await self._desk.read(read_control)
        await self._desk.require_writes()

    async def _ask_redis(self) -> None:
        await asyncio.to_thread(self._ping_redis)

    def _ping_redis(self) -> None:
        url = self._redis_url()
        if url is None:
            raise ConnectionError("no Redis is configured or running")
        events = EventList(event_list.connect(url))
        try:
            events.ping()
            events.require_pushes()
        finally:
            events.close()

    async def _ask_temporal(self) -> None:
        client = await self._waker.client()
        await client.service_client.check_health(timeout=timedelta(seconds=_PATIENCE))

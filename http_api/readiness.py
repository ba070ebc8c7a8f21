"""What `/readyz` tells of each server. Only the database decides: with Redis or Temporal down orders are taken all the
same, and turning callers away then would make of a delay a loss. Both are reported for whoever watches."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from http_api.orders_desk import OrdersDesk
from http_api.waking import Waker
from pipeline import event_list
from pipeline.event_list import EventList
from store.control import read_control

_PATIENCE = 2.0  # seconds for each answer
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

    async def answers(self) -> bool:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._quietly())
        done, _ = await asyncio.wait([self._asking], timeout=_PATIENCE)
        return bool(done) and not self._asking.cancelled() and self._answered

    async def _quietly(self) -> None:
        self._answered = False
        try:
            await self._ask()
        except Exception:
            return
        self._answered = True


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
            self._database.answers(), self._redis.answers(), self._temporal.answers()
        )
        return {
            "database": Check(database, "answers" if database else "does not answer; no order can be taken"),
            "redis": Check(redis, "answers" if redis else f"does not answer; {_MEANWHILE}"),
            "temporal": Check(temporal, "answers" if temporal else f"does not answer; {_MEANWHILE}"),
        }

    async def _ask_database(self) -> None:
        await self._desk.read(read_control)

    async def _ask_redis(self) -> None:
        await asyncio.to_thread(self._ping_redis)

    def _ping_redis(self) -> None:
        url = self._redis_url()
        if url is None:
            raise ConnectionError("no Redis is configured or running")
        events = EventList(event_list.connect(url))
        try:
            events.ping()
        finally:
            events.close()

    async def _ask_temporal(self) -> None:
        client = await self._waker.client()
        await client.service_client.check_health(timeout=timedelta(seconds=_PATIENCE))

"""The HTTP API's composition root: settings -> database, Temporal, Redis -> routes -> a server.

It listens on loopback unless SAISEI_API_HOST says otherwise.

Run it with `python api.py`; SIGTERM or Ctrl-C lets the requests in flight finish.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import uvicorn
import uvloop
from fastapi import FastAPI
from sqlalchemy import Connection

import embedded
from config import Settings, end, no_arguments, unknown_settings
from contracts.errors import SaiseiError, Unreachable, WrongSettings
from http_api.app import build_app
from http_api.orders_desk import OrdersDesk
from http_api.readiness import Readiness
from http_api.settings import ApiSettings
from http_api.waking import Waker
from intake import Intake
from receivers.registry import by_name
from runs.profile import configured_address
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from store.receivers import register_receiver

logger = logging.getLogger("saisei.api")

_GRACE = 12  # seconds for requests in flight; the guard kills its children after 20


def application(settings: Settings, database: Database) -> FastAPI:
    """The application on that database, with the servers that are configured, else those of the embedded stack."""

    def temporal_address() -> str | None:
        if configured_address() is not None:
            return None  # what the environment or profile says goes first anyway
        stack = embedded.find(settings.home)
        return stack.temporal_address if stack else None

    def redis_url() -> str | None:
        if settings.redis_url is not None:
            return settings.redis_url
        stack = embedded.find(settings.home)
        return stack.redis_url if stack else None

    waker = Waker(settings, temporal_address)
    intake = Intake(database, waker.wake)
    desk = OrdersDesk(database, intake, settings.busy, set_up)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with waker, desk:
            yield

    return build_app(desk, intake, Readiness(desk, waker, redis_url), lifespan)


def set_up(connection: Connection) -> None:
    """Tables, control row and receivers, as the worker makes them too; changes nothing the second time.

    The receivers are registered before the first order can be: a receiver takes only what comes after its
    registration, and on a new database the API may be there before any worker.
    """
    initialize(connection, now_ms())
    for receiver in by_name().values():
        register_receiver(connection, receiver.name, receiver.event_types)


class _Server(uvicorn.Server):
    """uvicorn's server, told to stop by us: by itself it ends with the signal as its exit code, not with 0."""

    ready_line = ""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.ready_line, flush=True)


async def serve(settings: Settings, api: ApiSettings) -> None:
    """Answer requests until SIGTERM or SIGINT. Raises Unreachable when the port cannot be had."""
    by_name()  # before anything is opened: a registry that is wrong is told at once
    listener = _listen(api.host, api.port)
    database = Database(settings.database_url, busy_timeout=settings.busy)
    app = application(settings, database)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE,
        )
    )
    server.ready_line = f"api ready http://{api.host}:{listener.getsockname()[1]}"
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if app.state.stopping:
            server.should_exit = True  # told twice: at once
            return
        app.state.stopping = True
        loop.call_later(api.drain, setattr, server, "should_exit", True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve([listener])


def _listen(host: str, port: int) -> socket.socket:
    # The protocol by its number: only then does asyncio switch Nagle's delay off, which held each answer up for 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        return listener
    except OSError as error:
        listener.close()
        raise Unreachable(
            f"port {port} on {host} cannot be had ({os.strerror(error.errno or 0).lower()}); "
            "end the program that has it, or choose another by SAISEI_API_PORT"
        ) from None


def main() -> int:
    """The process: logs to stderr, one sentence when it cannot start, and exit code 2 for unusable settings, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if ignored := unknown_settings():
        logger.warning(ignored)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Settings.from_env(), ApiSettings.from_env()))
    except SaiseiError as error:
        print(f"api: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongSettings) else 1
    return 0


if __name__ == "__main__":
    no_arguments("api.py", "Serve the HTTP API, until SIGTERM or Ctrl-C.")
    end(main())

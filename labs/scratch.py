"""A scratch stack: servers, database and worker of a walk-through's own, in a temporary folder, gone at its end.

Nothing of the environment reaches it (no TEMPORAL_*, REDIS_URL or DATABASE_URL), so that live data cannot be touched.
The servers are attached to this process through the guard, so that not even `kill -9` leaves one behind.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from temporalio.client import Client
from temporalio.runtime import Runtime, TelemetryConfig

import embedded
from config import Settings
from contracts import search
from contracts.errors import Refused, Unreachable
from receivers.base import Receiver
from store.engine import Database, sqlite_url
from worker import SaiseiWorker


@dataclass(frozen=True)
class Scratch:
    """The folder and the servers of one walk-through. `kept`: they stay when it is over."""

    home: Path
    stack: embedded.Stack
    kept: bool

    @property
    def redis_url(self) -> str:
        """The scratch Valkey."""
        assert self.stack.redis_url is not None
        return self.stack.redis_url

    @property
    def ui_url(self) -> str | None:
        """The Web UI; there is one only where the servers are kept, since a link must not lead nowhere."""
        return self.stack.ui_url if self.kept else None


@contextlib.asynccontextmanager
async def scratch_stack(
    *, services: Sequence[str] = ("temporal", "valkey"), children: Sequence[embedded.Child] = (), keep: bool = False
) -> AsyncIterator[Scratch]:
    """Servers for the block, and `children` beside them. With `keep` they and their folder stay if it ends well;
    otherwise both are gone after it.

    Raises Unreachable, in one sentence, when a server cannot be started.
    """
    home = Path(tempfile.mkdtemp(prefix="saisei-lab-")).resolve()
    kept = False
    try:
        with contextlib.ExitStack() as held:
            held.enter_context(_ended_like_ctrl_c())
            held.enter_context(_log_file(home / "worker.log"))
            stack = held.enter_context(_start(home, services, children, headless=not keep))
            yield Scratch(home, stack, keep)
            if keep:
                _keep(stack)
                kept = True
    finally:
        if not kept:
            shutil.rmtree(home, ignore_errors=True)


@contextlib.asynccontextmanager
async def scratch_worker(
    scratch: Scratch, receivers: Sequence[Receiver], draining: Sequence[str] | None = None
) -> AsyncIterator[SaiseiWorker]:
    """A worker in this process with a database of its own; `draining` as for SaiseiWorker."""
    database = Database(sqlite_url(scratch.home / "saisei.db"))
    settings = Settings(home=scratch.home, database_url=str(database.url), redis_url=scratch.redis_url, idle=0.2)
    try:
        # The core's own log goes to stdout, where only the walk-through's lines belong.
        runtime = Runtime(telemetry=TelemetryConfig(logging=None))
        assert scratch.stack.temporal_address is not None
        client = await Client.connect(scratch.stack.temporal_address, runtime=runtime)
        async with SaiseiWorker(
            settings, client, database, scratch.redis_url, receivers=receivers, draining=draining
        ) as worker:
            yield worker
    finally:
        database.close()


def process_env(**settings: float) -> dict[str, str]:
    """For a process of the stack: settings of its own, the default ones but for `settings`, whatever this process was
    told, and the database of its home."""
    known = {spec.name: spec.default for spec in fields(Settings) if isinstance(spec.default, int | float)}
    values = {f"SAISEI_{name.upper()}": f"{value:g}" for name, value in {**known, **settings}.items()}
    return {"DATABASE_URL": "", "SAISEI_API_DRAIN": "", "SAISEI_API_URL": "", **values}


def _start(
    home: Path, services: Sequence[str], children: Sequence[embedded.Child], *, headless: bool
) -> embedded.Stack:
    try:
        with ended_at_once():
            return embedded.start(
                home, services=services, children=children, search_attributes=search.START_DEV, headless=headless
            )
    except embedded.EmbeddedError as error:
        raise Unreachable(f"the walk-through's own servers cannot be started: {error}") from error


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """For a start that blocks the event loop: asyncio would only note Ctrl-C, here it ends the start, which then stops
    what was started half. SIGTERM and a closed terminal do the same."""
    former = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    former = {n: handler for n, handler in former.items() if handler not in (signal.SIG_IGN, None)}
    for number in former:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _keep(stack: embedded.Stack) -> None:
    try:
        stack.keep()
    except embedded.EmbeddedError as error:
        raise Unreachable(str(error)) from error


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """What the worker and the SDK log (every failure that is made on purpose, with its stack) goes to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does, so that its folder is cleared away too."""
    loop = asyncio.get_running_loop()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        loop.add_signal_handler(number, os.kill, os.getpid(), signal.SIGINT)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def make_folder(folder: Path) -> None:
    """Make the folder that the caller named. Raises Refused when that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"the folder {folder} cannot be made ({error.strerror}); name one that you may write with --dir"
        ) from None

"""`up` and `down`: the embedded servers, the worker and the HTTP API, in the background.

What is configured (REDIS_URL, Temporal's environment or profile, DATABASE_URL) is used as it is, and not started.
"""

import asyncio
import importlib.util
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import make_url

import embedded
from commands.context import Context
from commands.parsing import Commands, whole_number
from contracts import search
from contracts.errors import NotFound, Refused
from embedded import AlreadyRunning, Child, EmbeddedError, Stack
from http_api.settings import DEFAULT_PORT, HOST, ApiSettings
from runs.profile import configured_address

_ROOT = Path(__file__).resolve().parent.parent
_READY_LINE = "worker ready"
_API_READY_LINE = "api ready"
_OTHERS_START = 90.0  # seconds that a start by somebody else may take
_PORT = whole_number(1, 65_535)


def add(commands: Commands) -> None:
    """Register the commands."""
    up = commands.command("up", _up, "starter.py up --ui-port 8233")
    for flag, what in (("--temporal-port", "Temporal"), ("--ui-port", "the Web UI"), ("--redis-port", "Redis")):
        up.add_argument(flag, type=_PORT, metavar="PORT", help=f"port of {what}; its former or a free one if not said")
    up.add_argument(
        "--api-port",
        type=_PORT,
        metavar="PORT",
        help=f"port of the HTTP API; SAISEI_API_PORT, else {DEFAULT_PORT} or a free one if not said",
    )
    commands.command("down", _down, "starter.py down")


def worker_child(env: Mapping[str, str] | None = None) -> Child:
    """The worker as a child of the embedded stack; `env` goes on top of the stack's environment."""
    return Child("worker", [sys.executable, str(_ROOT / "worker.py")], env=env or {}, ready_line=_READY_LINE)


def api_child(port: int, env: Mapping[str, str] | None = None, host: str = HOST) -> Child:
    """The HTTP API at that address as a child of the embedded stack, which then tells it to whoever finds the stack."""
    at = ApiSettings(host, port)
    return Child(
        "api",
        [sys.executable, str(_ROOT / "api.py")],
        env={**(env or {}), "SAISEI_API_HOST": host, "SAISEI_API_PORT": str(port)},
        ready_line=_API_READY_LINE,
        url=f"http://{at.reachable_at}:{port}",
    )


async def _up(context: Context, args: Namespace) -> int:
    services = [
        *(() if context.settings.redis_url else ("valkey",)),
        *(() if configured_address() else ("temporal",)),
    ]
    await _check_configured(context)
    stack = context.stack
    started = stack is None
    if stack is None:
        children = [worker_child(), *_api(context, args)]
        what = ", ".join([*(service.capitalize() for service in services), *(child.name for child in children)])
        context.say(f"starting {what} ...")
        try:
            stack = _start(context, args, services, children)
        except AlreadyRunning:
            # Somebody else is starting it just now.
            stack, started = await _wait_for(context), False
    if not started:
        _check_running(stack, services, args)
        context.say("it is up already")
    context.__dict__["stack"] = stack  # what was found before is no longer so
    _print(context, stack, started)
    return 0


async def _down(context: Context, args: Namespace) -> int:
    home = context.settings.home
    if not home.is_dir():
        # What runs elsewhere would go on while somebody believes that it was stopped.
        raise NotFound(f"there is no home {home}, so nothing was stopped; name the right one by SAISEI_HOME")
    stopped = await asyncio.to_thread(embedded.stop, home)
    if context.json:
        context.result({"stopped": stopped})
    else:
        context.line("stopped" if stopped else "nothing is running here")
    return 0


async def _check_configured(context: Context) -> None:
    """A server that is configured and does not answer is told at once, and not by the worker's log."""
    if context.settings.redis_url:
        _ = context.events
    if configured_address():
        await context.client()
    context.open_database()


def _api(context: Context, args: Namespace) -> list[Child]:
    """The API's child, or none where what it needs is not installed. Raises Refused when the port is taken."""
    if not all(importlib.util.find_spec(package) for package in ("fastapi", "uvicorn")):
        context.say("the HTTP API is not started: it needs fastapi and uvicorn; install Saisei with its extra `http`")
        return []
    asked, host = _asked_api_port(args), ApiSettings.from_env().host
    if not asked:  # 0 is any free one
        return [api_child(embedded.free_or_other(DEFAULT_PORT) if asked is None else embedded.any_free(), host=host)]
    if not embedded.is_free(asked):
        raise Refused(f"port {asked} on {HOST} is taken; end the program that has it, or choose another by --api-port")
    return [api_child(asked, host=host)]


def _asked_api_port(args: Namespace) -> int | None:
    asked: int | None = args.api_port
    if asked is None and os.environ.get("SAISEI_API_PORT"):
        asked = ApiSettings.from_env().port
    return asked


def _start(context: Context, args: Namespace, services: list[str], children: list[Child]) -> Stack:
    home = context.settings.home

    def start(children: list[Child]) -> Stack:
        return embedded.start(
            home,
            services=services,
            children=children,
            search_attributes=search.START_DEV,
            detached=True,
            temporal_port=args.temporal_port,
            ui_port=args.ui_port,
            redis_port=args.redis_port,
        )

    # asyncio would only note Ctrl-C; here it is to end the start, and what was started half.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            return start(children)
        except AlreadyRunning:
            raise
        except EmbeddedError as error:
            # The servers take seconds, and another `up` may have taken the port that was free before. Whether it is
            # taken now says nothing: that one may be down again.
            if _asked_api_port(args) or _named(error) != "api":
                raise
            return start([worker_child(), *_api(context, args)])
    except AlreadyRunning:
        raise
    except EmbeddedError as error:
        raise _own_words(home, error) from error
    finally:
        signal.signal(signal.SIGINT, former)


def _named(error: EmbeddedError) -> str:
    """What could not start."""
    return str(error).partition(" ")[0]


def _own_words(home: Path, error: EmbeddedError) -> Exception:
    """The own sentence of the worker or the API, when it was one of them that could not start."""
    name = _named(error)
    if name not in ("worker", "api"):
        return error
    try:
        words = (home / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return error
    # Beneath the sentence of an earlier start there may be newer lines, but no newer sentence.
    own = [line for line in words[-20:] if line.startswith(f"{name}: ")]
    return Refused(f"the {name} cannot start: {own[-1].removeprefix(f'{name}: ')}") if own else error


async def _wait_for(context: Context) -> Stack:
    home = context.settings.home
    try:
        async with asyncio.timeout(_OTHERS_START):
            while (stack := embedded.find(home)) is None:
                await asyncio.sleep(0.2)
            return stack
    except TimeoutError:
        raise Refused(f"somebody else started a stack on {home}, and it does not become ready; stop it") from None


def _check_running(stack: Stack, services: list[str], args: Namespace) -> None:
    """Raises Refused when the stack that is up is not the one that was asked for."""
    has = {"valkey": stack.redis_url, "temporal": stack.temporal_address}
    for service in services:
        if has[service] is None:
            raise Refused(f"it is up without {service}, which was configured at its start; `starter.py down` it first")
    if stack.failing:
        raise Refused(
            f"it is up, but {', '.join(stack.failing)} dies again and again; see {stack.home / 'logs'}, and "
            "`starter.py down` it"
        )
    if "worker" not in stack.pids:
        raise Refused("it is up without a worker; stop it where it was started, or start `python worker.py` beside it")
    for asked, address in (
        (args.temporal_port, stack.temporal_address),
        (args.ui_port, stack.ui_url),
        (args.redis_port, stack.redis_url and stack.redis_url.rpartition("/")[0]),
        (args.api_port, stack.url("api")),
    ):
        if asked is not None and (address or "").rpartition(":")[2] != str(asked):
            raise Refused(f"it is up on other ports than {asked}; `starter.py down` it first")


def _print(context: Context, stack: Stack, started: bool) -> None:
    addresses = {
        "Temporal": configured_address() or stack.temporal_address,
        "Web UI": context.ui_url,
        "Redis": _without_password(context.settings.redis_url) or stack.redis_url,
        "API": stack.url("api"),
        "database": make_url(context.settings.database_url).render_as_string(),
        "logs": str(stack.home / "logs"),
    }
    from receivers.registry import by_name  # here, as in Context

    links = context.links.everything(by_name()) if context.links else []
    if context.json:
        names = {"Temporal": "temporal", "Web UI": "ui", "Redis": "redis", "API": "api"}
        document = {names.get(name, name): address for name, address in addresses.items()}
        context.result({"started": started, **document, "links": dict(links)})
        return
    context.fields(addresses)
    if links:
        context.line("")
        context.fields(dict(links))


def _without_password(url: str | None) -> str | None:
    if url is None or "@" not in url:
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}"

"""`check`: whether everything that work needs answers; made for health checks, which read its exit code."""

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable

from commands.context import Context
from commands.parsing import Commands
from contracts.errors import Unreachable, WrongSettings
from failures import FAILURES, sentence
from runs.presence import unpolled_queues, worker_answers


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("check", _check, "starter.py check")


async def _check(context: Context, args: Namespace) -> int:
    troubles = {
        "database": await _trouble(lambda: asyncio.to_thread(lambda: context.database)),
        "redis": await _trouble(lambda: asyncio.to_thread(lambda: context.events.require_pushes())),
        "temporal": await _trouble(context.client),
        "worker": await _trouble(lambda: _require_worker(context)),
    }
    # Once each: without Temporal the worker has the same trouble.
    found = list(dict.fromkeys(trouble for trouble in troubles.values() if trouble))
    if context.json:
        context.result({name: {"ok": why is None, "detail": why or "answers"} for name, why in troubles.items()})
        return 1 if found else 0
    if found:
        raise Unreachable("; ".join(found))
    context.line("database, Redis, Temporal and a worker answer")
    return 0


async def _trouble(ask: Callable[[], Awaitable[object]]) -> str | None:
    """Why it does not answer, or None."""
    try:
        await ask()
    except WrongSettings:
        raise
    except (*FAILURES, TimeoutError, RuntimeError) as error:
        return sentence(error)
    return None


async def _require_worker(context: Context) -> None:
    client = await context.client()
    unpolled = await unpolled_queues(client)
    if unpolled:
        raise Unreachable(f"no worker asks for work on {' and '.join(unpolled)}; start one with `python worker.py`")
    if not await worker_answers(client):
        raise Unreachable("a worker asks for work and does not answer; see its log")

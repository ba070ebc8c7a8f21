"""Telling Temporal of what the database holds already.

Where it does not answer nothing is lost, since the worker's look finds the work; a person reads the same sentence then,
whatever the command was.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from temporalio.service import RPCError

from commands.context import Context
from contracts.errors import Unreachable, WrongSettings
from failures import sentence

if TYPE_CHECKING:
    from runs.starts import Runs

AWAY = (Unreachable, WrongSettings, RPCError, RuntimeError, OSError)
_PATIENCE = 5.0  # seconds, for all of it


def later(error: BaseException) -> str:
    """What follows from Temporal's being away for the reason that `error` has."""
    why = f"it does not answer within {_PATIENCE:g} s" if isinstance(error, TimeoutError) else sentence(error)
    return f"nothing is lost, it goes on once Temporal is back: {why}"


async def tell(context: Context, send: Callable[["Runs"], Awaitable[object]]) -> bool:
    """Whether Temporal was told; a person is told why not."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await send(await context.runs())
    except AWAY as error:
        context.say(later(error))
        return False
    return True


async def wake(context: Context, stages: Iterable[str] | None = None) -> None:
    """Wake these stages; the relay if not said, which wakes those that it hands work to."""
    await tell(context, lambda runs: runs.wake(stages))

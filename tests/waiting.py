"""Waiting in tests: never for a fixed time, always for something, and it says for what.

A bound that only guards against waiting for ever is a minute: it costs nothing where all is well, and a machine that is
busy with other things breaks a shorter one by chance. How quick something is, the benchmarks measure.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float, description: str) -> T:
    """Call `predicate` until its answer is true, at most `timeout` seconds, and return the answer.

    Raises:
        AssertionError: it never did; the message has the description and the last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {description} (last: {answer!r})")
        time.sleep(0.02)


async def eventually(predicate: Callable[[], Any], timeout: float, description: str) -> Any:
    """`wait_until` for tests on an event loop; `predicate` may be a coroutine function.

    Raises:
        AssertionError: it never did; the message has the description and the last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {description} (last: {answer!r})")
        await asyncio.sleep(0.01)

"""Waiting in tests: never for a fixed time, always for something, and it says for what."""

import time
from collections.abc import Callable
from typing import TypeVar

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

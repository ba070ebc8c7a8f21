"""What a process of ours may fail with, and the one sentence that a person reads then."""

from redis import RedisError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from temporalio.service import RPCError

from contracts.errors import SaiseiError
from embedded import EmbeddedError

# What a process of ours may fail with; anything else is a bug, and its traceback is wanted.
FAILURES = (SaiseiError, EmbeddedError, DBAPIError, PoolTimeout, RedisError, RPCError, OSError)


def sentence(error: BaseException) -> str:
    """What is wrong, in one line."""
    if isinstance(error, DBAPIError):
        text = f"the database failed: {_first_line(error.orig)}"
    elif isinstance(error, RedisError):
        text = f"Redis failed: {_first_line(error)}"
        if "WRONGTYPE" in text:
            text = "a Redis key of Saisei holds another type; remove or rename `outbox.events` and `processed` there"
    elif isinstance(error, RPCError):
        text = f"Temporal failed: {_first_line(error.message)}"
    elif isinstance(error, OSError):
        text = (error.strerror or str(error)) + (f": {error.filename}" if error.filename else "")
    else:
        text = " ".join(str(error).split())
    return text.rstrip(".")


def _first_line(text: object) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0] if lines else "it gave no reason"

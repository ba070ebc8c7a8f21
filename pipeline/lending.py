"""A receiver writes through our transaction and does not end it: an effect that commits without its `done` would
happen again, and neighbours may have written through the same transaction."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import sqlalchemy.exc
from sqlalchemy import Connection, event

from receivers.base import ReceiverUnavailable

_ENDINGS = ("commit", "rollback", "close", "invalidate", "detach", "get_transaction", "get_nested_transaction")
# `ROLLBACK TO` a savepoint ends nothing. A comment may stand before the word.
_BEFORE = r"(?:\s|;|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
_ENDING = re.compile(_BEFORE + r"(commit|end|abort|rollback(?!\s+((work|transaction)\s+)?to\b))\b", re.IGNORECASE)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a receiver must not end the transaction that it is given; what it writes commits with `done`")


def _refuse_ending(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
    if _ENDING.match(statement):
        _refuse()


@contextmanager
def lent(connection: Connection) -> Iterator[Connection]:
    """The connection without the ways to end its transaction; savepoints work. What is no Exception becomes one."""
    for name in _ENDINGS:
        setattr(connection, name, _refuse)
    event.listen(connection, "before_cursor_execute", _refuse_ending)
    try:
        yield connection
    except sqlalchemy.exc.TimeoutError as error:
        # A pool without a free connection is not ours, which gave this one before: the receiver's other side.
        raise ReceiverUnavailable(str(error)) from error
    except Exception:
        raise
    except BaseException as error:
        # `sys.exit()` in a library, a cancelled call: a failed attempt like any other, and not the worker's end.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        event.remove(connection, "before_cursor_execute", _refuse_ending)
        for name in _ENDINGS:
            delattr(connection, name)

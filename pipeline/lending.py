"""A receiver writes through our transaction and does not end it: an effect that commits without its `done` would
happen again, and neighbours may have written through the same transaction.

The ways to end it that our connection has are closed while it is lent. The driver's connection behind it is open to
whoever asks for it, and that is found out at the savepoint, which is gone then.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import sqlalchemy.exc
from sqlalchemy import Connection, event

from contracts.errors import TransactionEnded, TransactionLost
from receivers.base import ReceiverUnavailable
from store.dialect import is_infrastructure_error

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


@contextmanager
def attempt(connection: Connection, receiver: str, positions: Sequence[int]) -> Iterator[None]:
    """All that the block does for these events at the receiver, or nothing of it, where it raises.

    Raises TransactionEnded where the receiver has ended the transaction: nothing of all of it is kept then.
    """
    savepoint = connection.begin_nested()
    ended = TransactionEnded(receiver, positions)
    try:
        yield
    except TransactionLost as error:
        raise ended from error
    except Exception as error:
        if not is_infrastructure_error(error):
            _settle(savepoint.rollback, ended)
        raise
    else:
        _settle(savepoint.commit, ended)


def _settle(savepoint: Callable[[], None], ended: TransactionEnded) -> None:
    try:
        savepoint()
    except (TransactionLost, sqlalchemy.exc.DBAPIError) as error:
        if is_infrastructure_error(error) and not isinstance(error, TransactionLost):
            raise
        raise ended from error

"""A receiver writes through our transaction and does not end it: an effect that commits without its `done` would
happen again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sqlalchemy import Connection

_ENDINGS = ("commit", "rollback", "close", "invalidate", "detach", "get_transaction")


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a receiver must not end the transaction that it is given; what it writes commits with `done`")


@contextmanager
def lent(connection: Connection) -> Iterator[Connection]:
    """The connection without the ways to end its transaction; savepoints work."""
    for name in _ENDINGS:
        setattr(connection, name, _refuse)
    try:
        yield connection
    finally:
        for name in _ENDINGS:
            delattr(connection, name)

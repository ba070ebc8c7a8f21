"""The embedded servers: Temporal and Valkey from their wheels, on loopback, with all data in one
folder.

`start` hands a guard process the servers and the commands beside them (the worker, the API). The
guard holds a pipe to its parent and stops everything when the pipe closes, so that neither Ctrl-C
nor `kill -9` of the parent leaves a process behind. `TemporalServer` and `ValkeyServer` are the
same servers without the guard, for tests.

What this package keeps: nothing is stopped that it did not start, and nothing listens off loopback.
"""

from embedded._ports import any_free, free_or_other, is_free
from embedded._servers import TemporalServer, ValkeyServer
from embedded._stack import Stack, find, start, stop
from embedded._state import Child
from embedded.errors import AlreadyRunning, EmbeddedError

__all__ = [
    "AlreadyRunning",
    "Child",
    "EmbeddedError",
    "Stack",
    "TemporalServer",
    "ValkeyServer",
    "any_free",
    "find",
    "free_or_other",
    "is_free",
    "start",
    "stop",
]

"""Which loopback port a server gets: the one asked for, else its former one, else a free one.

A restart on the same home keeps its ports while they are free, so that links into the Web UI stay
valid.
"""

import contextlib
import json
import os
import socket
from pathlib import Path

from embedded.errors import EmbeddedError

LOOPBACK = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    # macOS lets a socket with SO_REUSEADDR bind 127.0.0.1 beside a listener on all addresses, so
    # ask first.
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=0.2):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # The servers set this too: connections of a former run that linger in TIME_WAIT are no
        # obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def any_free() -> int:
    """A loopback port that was free a moment ago; whoever uses it must be ready to lose the race
    for it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def check_asked(port: int, purpose: str) -> int:
    """Return the port that somebody asked for.

    Raises:
        EmbeddedError: it is no port number, or something else listens there.
    """
    if not 1 <= port <= 65535:
        raise EmbeddedError(f"{port} is no port number; give one from 1 to 65535 for {purpose}.")
    if not is_free(port):
        raise EmbeddedError(
            f"Port {port} for {purpose} is taken on {LOOPBACK}; stop what listens there or choose another port."
        )
    return port


def free_or_other(port: int) -> int:
    """`port` if it is free, else one that was free a moment ago."""
    return port if is_free(port) else any_free()


class FormerPorts:
    """The ports of the last run on a home, by name, in `run/ports.json`; a hint and never more
    than that.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "run" / "ports.json"

    def get(self, name: str) -> int | None:
        """The port that this name had, if it is free now."""
        port = self._read().get(name)
        return port if port is not None and is_free(port) else None

    def remember(self, ports: dict[str, int]) -> None:
        """Keep these ports for the next start; a full disk loses the hint and nothing else."""
        with contextlib.suppress(OSError):
            temporary = self._path.with_name(f"ports.json.{os.getpid()}")
            temporary.write_text(json.dumps({**self._read(), **ports}), encoding="utf-8")
            temporary.replace(self._path)

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: v for k, v in found.items() if isinstance(v, int) and 1 <= v <= 65535}

"""The worker of `rebuild`: as it is, but it writes down how long each of its write transactions kept others waiting.

`python -m bench.measured_worker FILE` appends a line to FILE for each: when it ended (seconds since 1970), and seconds.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from sqlalchemy import Connection

import worker
from config import end
from store.engine import Database


def _measure(into: TextIO) -> None:
    write = Database.write

    @contextmanager
    def measured(self: Database) -> Iterator[Connection]:
        with write(self) as connection:
            begun = time.monotonic()
            yield connection
        into.write(f"{time.time():.4f} {time.monotonic() - begun:.5f}\n")

    Database.write = measured  # type: ignore[method-assign]


if __name__ == "__main__":
    with open(sys.argv[1], "a", buffering=1) as lines:
        _measure(lines)
        code = worker.main()
    end(code)

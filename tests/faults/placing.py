"""A placing process to be killed: `python -m tests.faults.placing DATABASE LOG PREFIX`.

It writes `invoke ID` before and `ok ID` after each placing, and places until it is killed. What a killed process has
written stays, so no line is synced.
"""

import asyncio
import itertools
import os
import sys
from pathlib import Path

from contracts.orders import Order
from intake import Intake
from store.engine import Database


async def _nobody() -> None:
    """There is no pipeline to wake."""


def main(url: str, log: Path, prefix: str) -> None:
    intake = Intake(Database(url), _nobody)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())

    for number in itertools.count():
        order = Order(f"{prefix}-{number}", "sku", 1, 100, "JPY")
        note(f"invoke {order.id}")
        placed = intake.place(order)
        note(f"ok {order.id}")
        asyncio.run(intake.wake_if_cold(placed))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

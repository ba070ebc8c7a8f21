"""The second process of `contention`: places orders until its input closes, then prints what each one took.

`python -m bench.writer DATABASE PREFIX RATE` prints {"wait": [ms...], "whole": [ms...]}: the time until the write
transaction began, and until it was committed.
"""

import json
import select
import sys
import time

from contracts.orders import Order
from store.clock import now_ms
from store.engine import Database
from store.orders import place_order


def main(url: str, prefix: str, rate: float) -> None:
    """Place orders at `rate` a second."""
    database = Database(url)
    waits: list[float] = []
    wholes: list[float] = []
    started = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        order = Order(f"{prefix}-{len(waits)}", "sku", 1, 100, "JPY")
        before = time.monotonic()
        with database.write() as connection:
            waits.append((time.monotonic() - before) * 1000)
            place_order(connection, order, now_ms())
        wholes.append((time.monotonic() - before) * 1000)
        time.sleep(max(0.0, started + len(waits) / rate - time.monotonic()))
    database.close()
    print(json.dumps({"wait": waits, "whole": wholes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))

"""The worker of `poison`: one of its receivers cannot take the orders of one sku. `python -m bench.poisoned`."""

from collections.abc import Sequence

from sqlalchemy import Connection

from config import end
from contracts.events import Event
from receivers.builtin import Billing, Mail, Sales
from worker import main

POISON = "poison"


class Picky(Sales):
    """`sales`, but it looks at each order, and fails for poison."""

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        if any(event.payload["sku"] == POISON for event in events):
            raise ValueError("poison")
        super().deliver_batch(connection, events)


if __name__ == "__main__":
    end(main([Billing(), Mail(), Picky()]))

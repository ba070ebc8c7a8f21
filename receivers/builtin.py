"""The built-in receivers: `billing`, `mail` and `sales`. Each takes `order-placed` and writes to our own database."""

from collections.abc import Sequence

from sqlalchemy import Connection

from contracts.events import ORDER_PLACED, Event
from receivers.base import Receiver
from store.effects import apply_sales, write_billing_entries, write_mail_messages


class Billing(Receiver):
    """Writes one billing entry an order."""

    name = "billing"
    event_types = frozenset({ORDER_PLACED})

    def deliver(self, connection: Connection, event: Event) -> None:
        self.deliver_batch(connection, [event])

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        write_billing_entries(connection, events)


class Mail(Receiver):
    """Records one confirmation an order (a record in our database; nothing is sent)."""

    name = "mail"
    event_types = frozenset({ORDER_PLACED})

    def deliver(self, connection: Connection, event: Event) -> None:
        self.deliver_batch(connection, [event])

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        write_mail_messages(connection, events)


class Sales(Receiver):
    """Adds the order to the totals of the active generation."""

    name = "sales"
    event_types = frozenset({ORDER_PLACED})

    def deliver(self, connection: Connection, event: Event) -> None:
        self.deliver_batch(connection, [event])

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        apply_sales(connection, events)

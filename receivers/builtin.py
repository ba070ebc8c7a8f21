"""The built-in receivers: `billing`, `mail` and `sales`. Each takes `order-placed` and writes to our own database."""

from abc import abstractmethod
from collections.abc import Sequence

from sqlalchemy import Connection

from contracts.events import ORDER_PLACED, Event
from receivers.base import Receiver
from store.effects import apply_sales, write_billing_entries, write_mail_messages


class _ByStatement(Receiver):
    """Takes orders by one statement, however many they are."""

    event_types = frozenset({ORDER_PLACED})

    @abstractmethod
    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None: ...

    def deliver(self, connection: Connection, event: Event) -> None:
        self.deliver_batch(connection, [event])


class Billing(_ByStatement):
    """Writes one billing entry an order."""

    name = "billing"

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        write_billing_entries(connection, events)


class Mail(_ByStatement):
    """Records one confirmation an order (a record in our database; nothing is sent)."""

    name = "mail"

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        write_mail_messages(connection, events)


class Sales(_ByStatement):
    """Adds the order to the totals of the active generation."""

    name = "sales"

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        apply_sales(connection, events)

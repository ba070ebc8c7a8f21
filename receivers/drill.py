"""A receiver that obeys the drill switches (`fault on`), around a real one."""

from collections.abc import Sequence

from sqlalchemy import Connection

from contracts.events import Event
from receivers.base import Receiver, ReceiverUnavailable
from store.faults import OUTAGE, fault_mode


class InjectedFault(Exception):
    """The switch `fault on --mode error`."""


class Drillable(Receiver):
    """Asks for the switch in the transaction of the effect, then lets the real receiver do its work."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.name = receiver.name  # type: ignore[misc]  # of the one inside
        self.event_types = receiver.event_types  # type: ignore[misc]

    def described(self) -> str:
        return self._receiver.described()

    def deliver(self, connection: Connection, event: Event) -> None:
        self._obey(connection)
        self._receiver.deliver(connection, event)

    def deliver_batch(self, connection: Connection, events: Sequence[Event]) -> None:
        self._obey(connection)
        self._receiver.deliver_batch(connection, events)

    def _obey(self, connection: Connection) -> None:
        mode = fault_mode(connection, self.name)
        if mode == OUTAGE:
            raise ReceiverUnavailable(f"{self.name} is switched off (fault on --mode outage)")
        if mode is not None:
            raise InjectedFault(f"{self.name} is switched to fail (fault on)")

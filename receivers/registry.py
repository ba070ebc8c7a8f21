"""Which receivers there are. Add yours to RECEIVERS; the next start of the worker registers it."""

from collections.abc import Mapping, Sequence

from contracts.errors import NotFound
from receivers.base import Receiver
from receivers.builtin import Billing, Mail, Sales

RECEIVERS: Sequence[Receiver] = (Billing(), Mail(), Sales())


def by_name(receivers: Sequence[Receiver] = RECEIVERS) -> Mapping[str, Receiver]:
    """name -> receiver. Raises ValueError when two share a name: they would share one completion state."""
    names = [receiver.name for receiver in receivers]
    if len(set(names)) != len(names):
        raise ValueError(f"two receivers share a name: {sorted(names)}")
    return {receiver.name: receiver for receiver in receivers}


def require(name: str, receivers: Mapping[str, Receiver]) -> Receiver:
    """The receiver of that name. Raises NotFound with the names that there are."""
    try:
        return receivers[name]
    except KeyError:
        raise NotFound(f"there is no receiver {name}; there are {', '.join(sorted(receivers))}") from None

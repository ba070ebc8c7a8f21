"""Which receivers there are. Add yours to RECEIVERS; the next start of the worker registers it."""

from collections.abc import Mapping, Sequence

from contracts.errors import NotFound, WrongSettings
from receivers.base import Receiver
from receivers.builtin import Billing, Mail, Sales

RECEIVERS: Sequence[Receiver] = (Billing(), Mail(), Sales())


def by_name(receivers: Sequence[Receiver] = RECEIVERS) -> Mapping[str, Receiver]:
    """name -> receiver. Raises WrongSettings when two share a name: what one has taken would count for both."""
    named: dict[str, Receiver] = {}
    for receiver in receivers:
        other = named.setdefault(receiver.name, receiver)
        if other is not receiver:
            raise WrongSettings(
                {
                    "receivers/registry.py": f"two receivers are named {receiver.name}: {other.described()} and "
                    f"{receiver.described()}; give one of them another name"
                }
            )
    return named


def require(name: str, receivers: Mapping[str, Receiver]) -> Receiver:
    """The receiver of that name. Raises NotFound with the names that there are."""
    try:
        return receivers[name]
    except KeyError:
        raise NotFound(f"there is no receiver {name}; there are {', '.join(sorted(receivers))}") from None

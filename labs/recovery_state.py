"""What a walk through an outage shows after each step, and how it differs from what must be."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from store.control import read_control
from store.dead_letters import DeadFilter, totals_by_receiver
from store.rebuild import last_rebuild
from store.status import count_orders, effect_counts, sales_by_currency


@dataclass(frozen=True)
class Plan:
    """How many orders before the outage, and how many during it."""

    first: int = 12
    during: int = 8

    @property
    def all(self) -> int:
        """Orders in the end."""
        return self.first + self.during


@dataclass(frozen=True)
class State:
    """What the database says at one instant. `certificate`: of the last rebuild."""

    orders: int
    sales_orders: int
    sales_amount: int
    mail: int
    dead: int
    intake: str
    generation: str
    certificate: dict[str, Any] | None = None


@dataclass(frozen=True)
class Step:
    """One step: its name, a sentence on what was done, and what was read after it."""

    name: str
    what: str
    state: State

    def document(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {"step": self.name, **asdict(self.state)}


def amount_of(orders: int) -> int:
    """The sum of orders 1 to `orders`; order n has 100 n."""
    return 100 * orders * (orders + 1) // 2


def read_state(connection: Connection) -> State:
    """What the snapshot says."""
    control = read_control(connection)
    totals = sales_by_currency(connection, control.active_generation)
    rebuild = last_rebuild(connection)
    certificate = json.loads(rebuild.certificate) if rebuild and rebuild.certificate else None
    return State(
        orders=count_orders(connection),
        sales_orders=sum(orders for orders, _ in totals.values()),
        sales_amount=sum(amount for _, amount in totals.values()),
        mail=effect_counts(connection)["mail"],
        dead=sum(each.count for each in totals_by_receiver(connection, DeadFilter())),
        intake=control.intake,
        generation=control.active_generation,
        certificate=certificate,
    )


def differences(expected: State, found: State) -> list[str]:
    """Each field that is not as expected, a sentence; of a certificate those that can be known before."""
    off = []
    for name, value in asdict(expected).items():
        other = getattr(found, name)
        if isinstance(value, dict) and isinstance(other, dict):
            other = {key: other.get(key) for key in value}
        if other != value:
            off.append(f"{name.replace('_', ' ')} must be {value}, but is {other}")
    return off

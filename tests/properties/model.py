"""What must come out, in plain Python: no database, no queue, none of the project's code beside `Order`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.orders import Order

PLACED, TOLD = "order-placed", "order-told"


@dataclass(frozen=True)
class Fact:
    """An event as the model knows it."""

    event_id: str
    aggregate_id: str
    event_type: str


@dataclass
class Model:
    """`facts`: in the order of their recording. `takes`: receiver -> type -> how many facts there were before it took
    that type. `rebuilt`: orders that a rebuild put into the generation that is active now."""

    orders: dict[str, Order] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    takes: dict[str, dict[str, int]] = field(default_factory=dict)
    rebuilt: frozenset[str] = frozenset()
    paused: bool = False

    def place(self, order: Order) -> None:
        """A new order."""
        self.orders[order.id] = order
        self.facts.append(Fact(f"{order.id}:placed", f"order/{order.id}", PLACED))

    def tell(self, order_id: str, event_id: str) -> None:
        """A later event of an order."""
        self.facts.append(Fact(event_id, f"order/{order_id}", TOLD))

    def subscribe(self, receiver: str, *event_types: str) -> None:
        """It takes these from here on; what it took already goes on."""
        for event_type in event_types:
            self.takes.setdefault(receiver, {}).setdefault(event_type, len(self.facts))

    def owed(self, receiver: str) -> list[str]:
        """Event ids that the receiver is to take, in order."""
        since = self.takes[receiver]
        return [
            fact.event_id
            for number, fact in enumerate(self.facts)
            if fact.event_type in since and number >= since[fact.event_type]
        ]

    def by_aggregate(self, event_ids: Iterable[str]) -> dict[str, list[str]]:
        """The same ids in the same order, aggregate by aggregate."""
        aggregates = {fact.event_id: fact.aggregate_id for fact in self.facts}
        found: dict[str, list[str]] = {}
        for event_id in event_ids:
            found.setdefault(aggregates[event_id], []).append(event_id)
        return found

    def switched(self) -> None:
        """A rebuild or a rollback is active: it holds every order, taken or not."""
        self.rebuilt = frozenset(self.orders)

    def counted(self, taken: Iterable[str]) -> set[str]:
        """Orders in the active generation, where `sales` took these events."""
        return self.rebuilt | {event_id.removesuffix(":placed") for event_id in taken}

    def totals(self, order_ids: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Currency -> (orders, amount)."""
        sums: dict[str, tuple[int, int]] = {}
        for order_id in order_ids:
            order = self.orders[order_id]
            count, amount = sums.get(order.currency, (0, 0))
            sums[order.currency] = (count + 1, amount + order.amount)
        return sums

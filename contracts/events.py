"""An event: a fact about one aggregate, and the types that Saisei itself emits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ORDER_PLACED = "order-placed"
PAYMENT_CAPTURED = "payment-captured"
ORDER_SHIPPED = "order-shipped"


@dataclass(frozen=True)
class Event:
    """One row of the outbox as a receiver sees it.

    `position` is what the store gave it (unique, one to one with `event_id`; the key of every effect),
    `seq` counts from 1 within the aggregate, `body` is the payload as JSON text.
    """

    position: int
    event_id: str
    aggregate_id: str
    seq: int
    event_type: str
    body: str

    @cached_property
    def payload(self) -> Mapping[str, Any]:
        """The payload, parsed when first asked for."""
        parsed: Mapping[str, Any] = json.loads(self.body)
        return parsed


# Made once: making it took longer than what it does.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def payload_text(payload: Mapping[str, Any]) -> str:
    """The one JSON form of a payload: compact, keys sorted, so equal payloads are equal texts."""
    return _encode(payload)

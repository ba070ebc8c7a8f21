"""What the API answers with, and the schema that describes it. The rules of an order are contracts.orders; the schema
only tells of them, so its bounds are taken from there."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from contracts.identifiers import MAX_ID_LENGTH
from contracts.orders import CURRENCIES, MAX_AMOUNT, MAX_QTY
from store.clock import iso
from store.control import read_control
from store.orders import PlacedOrder
from store.status import count_orders, outbox_status, receiver_status, sales_by_currency


def order_document(placed: PlacedOrder) -> dict[str, Any]:
    """An order and when it was first placed: the same for its first answer and each later one."""
    return {**asdict(placed.order), "placed_at": iso(placed.placed_at)}


def sales_document(connection: Connection) -> dict[str, Any]:
    """The totals of the active generation, both read in one snapshot so that they belong together."""
    generation = read_control(connection).active_generation
    totals = sales_by_currency(connection, generation)
    return {
        "generation": generation,
        "orders": sum(orders for orders, _ in totals.values()),
        "totals": {
            currency: {"orders": orders, "amount": amount} for currency, (orders, amount) in sorted(totals.items())
        },
    }


def status_document(connection: Connection) -> dict[str, Any]:
    """How much there is in which state, read in one snapshot."""
    control = read_control(connection)
    outbox = outbox_status(connection)
    return {
        "orders": count_orders(connection),
        "outbox": {"pending": outbox.pending, "in_flight": outbox.in_flight, "fanned_out": outbox.fanned_out},
        "receivers": {
            each.receiver: {
                **each.counts,
                "held_since": iso(each.held_since),
                "reason": each.reason,
                "last_progress": iso(each.last_progress),
            }
            for each in receiver_status(connection)
        },
        "intake": {"state": control.intake, "paused_by": control.paused_by},
        "generation": control.active_generation,
    }


_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_LENGTH}
_ORDER_FIELDS: dict[str, Any] = {
    "id": _ID
    | {"description": "the business id; printable characters, no white space at its ends", "example": "order-7"},
    "sku": _ID | {"example": "sku-7"},
    "qty": {"type": "integer", "minimum": 1, "maximum": MAX_QTY, "example": 1},
    "amount": {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_AMOUNT,
        "description": "in minor units of the currency",
        "example": 700,
    },
    "currency": {"type": "string", "enum": sorted(CURRENCIES), "example": "JPY"},
}
_COUNT = {"type": "integer", "minimum": 0}
_TIME = {"type": "string", "format": "date-time"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, **more}


SCHEMAS: dict[str, Any] = {
    "Order": _object(_ORDER_FIELDS, additionalProperties=False),
    "PlacedOrder": _object({**_ORDER_FIELDS, "placed_at": _TIME}),
    "Sales": _object(
        {
            "generation": {"type": "string", "example": "initial"},
            "orders": _COUNT,
            "totals": {
                "type": "object",
                "description": "by currency, in minor units",
                "additionalProperties": _object({"orders": _COUNT, "amount": _COUNT}),
            },
        }
    ),
    "Status": _object(
        {
            "orders": _COUNT,
            "outbox": _object({"pending": _COUNT, "in_flight": _COUNT, "fanned_out": _COUNT}),
            "receivers": {"type": "object", "additionalProperties": {"type": "object"}},
            "intake": _object(
                {
                    "state": {"type": "string", "enum": ["OPEN", "PAUSED"]},
                    "paused_by": {"type": ["string", "null"]},
                }
            ),
            "generation": {"type": "string"},
        }
    ),
    "Health": _object({"ready": {"type": "boolean"}, "checks": {"type": "object"}}),
    "Alive": _object({"alive": {"type": "boolean"}}),
    "Problem": _object(
        {
            "type": {"type": "string", "format": "uri-reference", "example": "urn:saisei:problem:invalid-order"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
        },
        description="RFC 9457; 422 adds `fields`, a 503 of /readyz adds `ready` and `checks`",
    ),
}


def answer(schema: str, description: str) -> dict[str, Any]:
    """One successful answer in the description of an operation."""
    return {"description": description, "content": _content("application/json", schema)}


def problem(description: str) -> dict[str, Any]:
    """One error in the description of an operation."""
    return {"description": description, "content": _content("application/problem+json", "Problem")}


def request_body(schema: str) -> dict[str, Any]:
    """The body that an operation takes."""
    return {"required": True, "content": _content("application/json", schema)}


def _content(media_type: str, schema: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

"""The schema that describes what the API takes and answers, with an example of each answer.

The rules of an order are contracts.orders; the schema only tells of them, so its bounds are taken from there. What is
answered is made by store.documents; that the two agree is held by a test, which reads real answers by this schema.
"""

from typing import Any

from contracts.identifiers import MAX_ID_LENGTH
from contracts.orders import CURRENCIES, MAX_AMOUNT, MAX_QTY

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
_TEXT = {"type": "string"}
_TIME = {"type": "string", "format": "date-time", "example": "2026-11-29T18:30:00.123Z"}
_GENERATION = {"type": "string", "example": "initial"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, **more}


def _by(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "description": f"by {key}", "additionalProperties": schema}


def _or_null(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"], **more}


_SECONDS = {"type": "number", "minimum": 0}
_TOTALS = _by("currency, in its minor units", _object({"orders": _COUNT, "amount": _COUNT}))
_RECEIVER = _object(
    {
        "pending": _COUNT,
        "retrying": _COUNT,
        "held": {**_COUNT, "description": "pending ones while the receiver is on hold"},
        "dead": _COUNT,
        "done": _COUNT,
        "waived": _COUNT,
        "held_since": _or_null(_TIME),
        "reason": _or_null(_TEXT, description="why it is on hold"),
        "fault": _or_null(_TEXT, enum=["error", "outage", None], description="the drill switch that is on"),
        "oldest_seconds": _or_null(_SECONDS, description="how long the oldest waits that is neither taken nor dead"),
        "oldest_dead_seconds": _or_null(_SECONDS),
        "last_progress": _or_null(_TIME, description="when it last took something"),
    }
)
_REBUILD = _object(
    {
        "rebuild": {"type": "string", "example": "rebuild-1"},
        "phase": _TEXT,
        "generation": {"type": "string", "example": "generation-1"},
        "expected": _COUNT,
        "replayed": _COUNT,
    }
)
_STALL = _object(
    {
        "stage": {"type": "string", "example": "sales"},
        "event_id": {"type": "string", "example": "order-7:placed"},
        "since": _or_null(_TIME),
        "waits_for": _TEXT,
        "last_progress": _or_null(_TIME),
        "sentence": {**_TEXT, "description": "all of it, for a person"},
    }
)
_CHECK = _object({"ok": {"type": "boolean"}, "detail": _TEXT})

_AN_ORDER = {"id": "A-7", "sku": "tea", "qty": 2, "amount": 1980, "currency": "JPY"}
_A_RECEIVER = {
    "pending": 0,
    "retrying": 1,
    "held": 0,
    "dead": 0,
    "done": 11,
    "waived": 0,
    "held_since": None,
    "reason": None,
    "fault": None,
    "oldest_seconds": 2.5,
    "oldest_dead_seconds": None,
    "last_progress": "2026-11-29T18:30:00.123Z",
}
_SOME_TOTALS = {"JPY": {"orders": 11, "amount": 6600}}

SCHEMAS: dict[str, Any] = {
    "Order": _object(_ORDER_FIELDS, additionalProperties=False, example=_AN_ORDER),
    "PlacedOrder": _object(
        {**_ORDER_FIELDS, "placed_at": _TIME}, example={**_AN_ORDER, "placed_at": "2026-11-29T18:30:00.123Z"}
    ),
    "Sales": _object(
        {"generation": _GENERATION, "orders": _COUNT, "totals": _TOTALS},
        example={"generation": "initial", "orders": 11, "totals": _SOME_TOTALS},
    ),
    "Status": _object(
        {
            "orders": _COUNT,
            "outbox": _object({"pending": _COUNT, "in_flight": _COUNT, "fanned_out": _COUNT}),
            "receivers": _by("name", _RECEIVER),
            "jobs": _by("state, those in use", _COUNT),
            "intake": _object({"state": {"type": "string", "enum": ["OPEN", "PAUSED"]}, "paused_by": _or_null(_TEXT)}),
            "rebuild": _or_null(_REBUILD, description="the rebuild or rollback that runs"),
            "stalls": {
                "type": "array",
                "description": "backlogs that have not moved for a minute",
                "items": _STALL,
            },
            "generation": _object({"active": _GENERATION, "epoch": _COUNT, "totals": _TOTALS}),
        },
        example={
            "orders": 12,
            "outbox": {"pending": 0, "in_flight": 0, "fanned_out": 12},
            "receivers": {"sales": _A_RECEIVER},
            "jobs": {"COMPLETED": 3},
            "intake": {"state": "OPEN", "paused_by": None},
            "rebuild": None,
            "stalls": [],
            "generation": {"active": "initial", "epoch": 0, "totals": _SOME_TOTALS},
        },
    ),
    "Health": _object(
        {"ready": {"type": "boolean"}, "checks": _by("server", _CHECK)},
        example={"ready": True, "checks": {"database": {"ok": True, "detail": "answers"}}},
    ),
    "Alive": _object({"alive": {"type": "boolean"}}, example={"alive": True}),
    "Problem": _object(
        {
            "type": {"type": "string", "format": "uri-reference", "example": "urn:saisei:problem:invalid-order"},
            "title": _TEXT,
            "status": {"type": "integer"},
            "detail": _TEXT,
        },
        additionalProperties=True,
        description="RFC 9457; 422 adds `fields`, a 503 of /readyz adds `ready` and `checks`",
        example={
            "type": "urn:saisei:problem:conflict",
            "title": "Known with other content",
            "status": 409,
            "detail": "order A-7 was placed before with other content; nothing was changed",
        },
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


def path_parameter(name: str, schema: str, field: str) -> dict[str, Any]:
    """A part of an operation's path that is this field of that schema."""
    return {"name": name, "in": "path", "required": True, "schema": SCHEMAS[schema]["properties"][field]}


def _content(media_type: str, schema: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

"""Business ids: what is accepted, and how event and aggregate ids are derived from business keys.

An event id is derived from the business key and a fixed suffix (`order-7:placed`), so the same fact has
the same id however often it is told. Suffixes hold no colon, so no two facts share an id.
"""

from contracts.errors import InvalidInput

MAX_ID_LENGTH = 200  # keeps workflow ids and keyword search attributes (255) in bounds


def id_problem(value: object) -> str | None:
    """What is wrong with a business id, or None. Rejects non-strings, empty, > 200 characters, control
    characters and lone surrogates (which no database or wire format here can hold)."""
    if not isinstance(value, str):
        return "must be text"
    if not value.strip():
        return "must not be empty"
    if value != value.strip():
        return "must not begin or end with white space"
    if len(value) > MAX_ID_LENGTH:
        return f"must have at most {MAX_ID_LENGTH} characters"
    if not all(character.isprintable() for character in value):
        return "must not hold control or unprintable characters"
    return None


def require_id(value: str, field: str) -> str:
    """`value` itself; raises InvalidInput that names `field` when it is no usable id."""
    problem = id_problem(value)
    if problem:
        raise InvalidInput({field: problem})
    return value


def order_aggregate(order_id: str) -> str:
    """`order-7` -> `order/order-7`."""
    return f"order/{order_id}"


def job_aggregate(job_id: str) -> str:
    """`job-1` -> `job/job-1`."""
    return f"job/{job_id}"


def order_placed_id(order_id: str) -> str:
    """Event id of an order's `order-placed`."""
    return f"{order_id}:placed"


def payment_captured_id(job_id: str) -> str:
    """Event id of a job's `payment-captured`."""
    return f"{job_id}:payment-captured"


def order_shipped_id(job_id: str) -> str:
    """Event id of a job's `order-shipped`."""
    return f"{job_id}:order-shipped"

"""Reading an order from a request, strictly: one JSON object in UTF-8, bounded in size and time.

JSON as Python reads it takes more than JSON is, and drops what it should not: of a key given twice it keeps the last,
it knows NaN, and an integer of 64,000 digits costs it seconds. None of that may reach an order.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request

from contracts.errors import InvalidInput
from contracts.identifiers import MAX_ID_LENGTH

MAX_BODY = 64 * 1024
_DISCARDED = 1024 * 1024  # of a body too large: read and thrown away, so that its sender gets to read the answer
_PATIENCE = 15.0  # seconds for the whole body
_LONGEST_NUMBER = 24  # digits; anything longer is out of every bound that an order has


async def read_object(request: Request) -> Mapping[str, Any]:
    """The JSON object in the body. Raises HTTPException (400, 408, 413, 415), and InvalidInput for JSON that is no
    object or names a field twice."""
    _require_json(request)
    try:
        async with asyncio.timeout(_PATIENCE):
            body = await _read(request)
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete within {_PATIENCE:g} s") from None
    return parse_object(body)


def parse_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in `body`. Raises HTTPException (400) and InvalidInput."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
        )
    except UnicodeDecodeError:
        raise _malformed("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise _malformed("the body is not an order: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidInput({"body": "must be a JSON object with the fields of an order"})
    return value


def _malformed(detail: str) -> HTTPException:
    return HTTPException(400, detail)


def _require_json(request: Request) -> None:
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    # Required also because a page in a browser can send everything else across sites without asking.
    if kind.strip() != "application/json":
        raise HTTPException(415, "the body must be JSON, declared as Content-Type: application/json")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise HTTPException(415, "the body must be in UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "the body must not be compressed")


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > _DISCARDED:
        raise _too_large()
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DISCARDED:
            raise _too_large()
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        raise _too_large()
    return bytes(body)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body has more than {MAX_BODY // 1024} KiB, which no order needs")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        times = Counter(name for name, _ in pairs)
        raise InvalidInput({name[:MAX_ID_LENGTH]: "is given more than once" for name in times if times[name] > 1})
    return fields


def _no_constant(text: str) -> NoReturn:
    raise _malformed(f"the body is not JSON ({text} is no JSON number)")


def _integer(text: str) -> int:
    # Its value no longer matters, only that it is far out of bounds.
    return int(text) if len(text) <= _LONGEST_NUMBER else 10**_LONGEST_NUMBER

"""Every error is one RFC 9457 document: type, title, status, detail, and what the kind of error adds.

`type` is `about:blank` where the status says it all, and a URN of ours where a program may want to tell two reasons
for the same status apart. No answer holds a traceback, a path or an address: those go to the log.
"""

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from contracts.errors import Conflict, IntakePaused, InvalidInput, NotFound, Refused, StoreBusy, Unreachable
from store.dialect import is_infrastructure_error

logger = logging.getLogger("saisei.api")

_PAUSED_FOR = 10  # seconds: a pause ends when a person ends it, so asking more often is of no use
_BUSY_FOR = 1

_ROUTING = {
    404: "there is nothing here; /openapi.json lists what there is",
    405: "this method is not allowed here; the Allow header lists those that are",
}


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class OutcomeUnknown(Exception):
    """The database did not answer in time; what was asked for may have happened or not."""


class JsonAnswer(JSONResponse):
    """JSON with the text as it is. A lone surrogate, which no UTF-8 can hold, becomes a question mark: a caller may
    have sent one as a field's name, and the answer that names it must not fail."""

    def render(self, content: Any) -> bytes:
        """One form for one content, so that the same answer is the same bytes."""
        return _encode(content).encode("utf-8", "replace")


class Problem(JsonAnswer):
    """One error as its answer."""

    media_type = "application/problem+json"

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        kind: str | None = None,
        title: str | None = None,
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        """`kind` becomes the URN in `type`; the other named values become members of the document."""
        document = {
            "type": f"urn:saisei:problem:{kind}" if kind else "about:blank",
            "title": title or HTTPStatus(status).phrase,
            "status": status,
            "detail": detail,
            **extensions,
        }
        super().__init__(document, status_code=status, headers=dict(headers or {}))


def unavailable(detail: str, *, kind: str, title: str, after: int = _BUSY_FOR, **extensions: Any) -> Problem:
    """503: the same request may succeed `after` seconds later."""
    return Problem(503, detail, kind=kind, title=title, headers={"Retry-After": str(after)}, **extensions)


def answer_to(error: Exception) -> Response | None:
    """The answer that `error` stands for, or None: then it is a fault of ours."""
    for kind in type(error).__mro__:
        if kind in _ANSWERS:
            return _ANSWERS[kind](error)
    return None


def register(app: FastAPI) -> None:
    """Answer whatever an endpoint of `app` raises, and whatever never reaches one, with a problem."""

    async def known(_request: Request, error: Exception) -> Response:
        response = answer_to(error)
        if response is None:
            raise error
        return response

    async def unexpected(_request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so that the server logs it with its traceback.
        if is_infrastructure_error(error):
            return _database_down()
        return Problem(500, "something failed here that should not; the log has the reason")

    for kind in _ANSWERS:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(Exception, unexpected)


def _http(error: HTTPException) -> Response:
    # The framework's own say no more than the status does.
    bare = error.detail == HTTPStatus(error.status_code).phrase
    detail = _ROUTING.get(error.status_code, error.detail) if bare else error.detail
    return Problem(error.status_code, detail, headers=error.headers)


def _invalid_request(_error: RequestValidationError) -> Response:
    return Problem(400, "the request cannot be understood")


def _gone(_error: ClientDisconnect) -> Response:
    return Problem(400, "the request ended before its body was complete")  # nobody reads it


def _invalid(error: InvalidInput) -> Response:
    return Problem(
        422,
        "the order cannot be taken as it is; see fields",
        kind="invalid-order",
        title="Invalid order",
        fields=error.fields,
    )


def _conflict(error: Conflict) -> Response:
    return Problem(409, str(error), kind="conflict", title="Known with other content")


def _not_found(error: NotFound) -> Response:
    return Problem(404, str(error), kind="not-found", title="Not found")


def _paused(error: IntakePaused) -> Response:
    return unavailable(str(error), kind="intake-paused", title="Intake paused", after=_PAUSED_FOR)


def _refused(error: Refused) -> Response:
    return Problem(409, str(error), kind="refused", title="Refused")


def _busy(error: StoreBusy) -> Response:
    logger.warning("%s", error)
    return unavailable(
        "the database is busy; nothing was written, so ask again", kind="database-busy", title="Database busy"
    )


def _unreachable(error: Unreachable) -> Response:
    logger.warning("%s", error)
    return _database_down()


def _unknown(_error: OutcomeUnknown) -> Response:
    return unavailable(
        "the database did not answer in time; whether the order was taken is not known, so place it again as it is",
        kind="outcome-unknown",
        title="Outcome unknown",
    )


def _database(error: sa.exc.SQLAlchemyError) -> Response | None:
    if not is_infrastructure_error(error):
        return None
    logger.warning("the database failed: %s", str(error).partition("\n")[0])
    return _database_down()


def _database_down() -> Response:
    return unavailable(
        "the database does not answer; nothing is lost, so ask again",
        kind="database-unavailable",
        title="Database unavailable",
    )


_ANSWERS: Mapping[type, Callable[[Any], Response | None]] = {
    HTTPException: _http,
    RequestValidationError: _invalid_request,
    ClientDisconnect: _gone,
    InvalidInput: _invalid,
    Conflict: _conflict,
    NotFound: _not_found,
    IntakePaused: _paused,
    Refused: _refused,
    StoreBusy: _busy,
    Unreachable: _unreachable,
    OutcomeUnknown: _unknown,
    sa.exc.SQLAlchemyError: _database,
}

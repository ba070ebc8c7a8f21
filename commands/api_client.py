"""The HTTP API as the command line uses it: one sentence for whatever it says but the answer.

httpx is imported where it is used: most commands do without, and it may not be installed.
"""

import asyncio
import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from commands.following import watched
from commands.parsing import WrongUsage
from contracts.errors import Refused, Unreachable
from contracts.orders import Order
from http_api.settings import DEFAULT_PORT, HOST

if TYPE_CHECKING:
    import httpx

    from commands.context import Context

DEFAULT_URL = f"http://{HOST}:{DEFAULT_PORT}"
HERE = ""
_PATIENCE = 30.0  # seconds: longer than the API takes at worst to say that its database is busy
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_api_flag(parser: ArgumentParser, purpose: str, default: str | None) -> None:
    """`--api [URL]`; without URL it is HERE, which `api_url` resolves."""
    parser.add_argument(
        "--api",
        metavar="URL",
        nargs="?",
        const=HERE,
        default=default,
        help=f"{purpose} (URL if not said: SAISEI_API_URL, or the one of `up`)",
    )


def api_url(context: "Context", said: str) -> str:
    """The URL that was said; for HERE that of SAISEI_API_URL, or of the embedded stack that is up.

    Raises Unreachable when there is neither: whatever listens at the usual port may be another home's.
    """
    if said != HERE:
        return said
    configured = os.environ.get("SAISEI_API_URL")
    found = configured or (context.stack.url("api") if context.stack else None)
    if not found:
        raise Unreachable("no API is up here; start one with `make up`, or say which with a URL or SAISEI_API_URL")
    return found


class ApiClient:
    """One API. Each method raises Unreachable when it does not answer, Refused when it does and says no."""

    def __init__(self, url: str) -> None:
        """`url`: without a path, or with the one that the API stands under."""
        try:
            import httpx
        except ImportError:
            raise Unreachable("httpx is not installed; install Saisei with its extra `http`") from None
        self._errors = httpx.HTTPError
        self._url = url.rstrip("/")
        try:
            parsed = httpx.URL(self._url)
            host = parsed.host
            if parsed.scheme not in ("http", "https") or not host:
                raise ValueError
            # A proxy for the outside world cannot reach this machine's own loopback.
            self._client = httpx.Client(base_url=self._url, timeout=_PATIENCE, trust_env=host not in _LOOPBACK)
        except (httpx.InvalidURL, ValueError):
            raise WrongUsage(f"{url} is no URL of an API; give one like {DEFAULT_URL}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def place(self, order: Order) -> tuple[Mapping[str, Any], bool]:
        """The order as the API answers it, and whether it is new."""
        response = self._ask("POST", "/orders", asdict(order))
        if response.status_code not in (200, 201):
            raise Refused(f"{order.id} was refused: {response.status_code} {self._detail(response)}")
        return self._document(response), response.status_code == 201

    def sales(self) -> Mapping[str, Any]:
        """The totals that it serves."""
        response = self._ask("GET", "/sales")
        if response.status_code != 200:
            raise Refused(f"the API refused: {response.status_code} {self._detail(response)}")
        return self._document(response)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> "httpx.Response":
        try:
            return self._client.request(method, path, json=body)
        except self._errors as error:
            raise Unreachable(
                f"the API at {self._url} does not answer ({str(error) or type(error).__name__}); "
                "start it with `make up`, or correct --api or SAISEI_API_URL"
            ) from None

    def _document(self, response: "httpx.Response") -> Mapping[str, Any]:
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(f"what answers at {self._url} is not Saisei's API; correct --api or SAISEI_API_URL")
        return document

    def _detail(self, response: "httpx.Response") -> str:
        if response.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
            return f"(what answers at {self._url} may not be Saisei's API)"
        problem = self._document(response)
        fields = problem.get("fields")
        if isinstance(fields, dict) and fields:
            return "; ".join(f"{name} {what}" for name, what in fields.items())
        return str(problem.get("detail") or problem.get("title") or "without a reason")


async def place_through(said: str, context: "Context", orders: Sequence[Order]) -> list[tuple[Mapping[str, Any], bool]]:
    """Place `orders` one after the other through the API that `--api` says; what it answers to each. Ends at the first
    refusal: those before it are durable, and placing all of them again changes nothing for these."""
    with ApiClient(api_url(context, said)) as api, watched(context, "placing", orders) as shown:
        return [await asyncio.to_thread(api.place, order) for order in shown]  # Ctrl-C is heard between two orders

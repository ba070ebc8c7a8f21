"""`POST /orders` is called past the framework's routing; every request is answered as the routing would answer it."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import api as program
from config import Settings
from http_api.app import _Straight
from store.engine import Database
from store.schema import control
from tests.http.server import order

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
_number = count()


def body(**other: Any) -> bytes:
    return json.dumps(order(1) | other).encode()


async def chunks() -> AsyncIterator[bytes]:
    for _ in range(80):
        yield b" " * 1024


# method, path, body, headers
REQUESTS: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/orders", body(), JSON),
    ("POST", "/orders", body(), JSON),  # again
    ("POST", "/orders", body(amount=7), JSON),  # a conflict
    ("POST", "/orders?x=1&y", body(id="query"), JSON),
    ("POST", "/orders/", body(id="slash"), JSON),
    ("POST", "/orders/order-1", body(), JSON),
    ("POST", "/%6frders", body(id="escaped"), JSON),
    ("POST", "//orders", body(), JSON),
    ("POST", "/Orders", body(), JSON),
    *((method, "/orders", b"", {}) for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "post")),
    *(
        ("POST", "/orders", body(id=f"id-{value}", **{name: value}), JSON)
        for name, value in [
            ("qty", 0),
            ("qty", -1),
            ("qty", 1.0),
            ("qty", True),
            ("qty", None),
            ("qty", "1"),
            ("qty", 10**30),
            ("amount", 0),
            ("amount", -5),
            ("amount", 10**12 + 1),
            ("amount", 1e2),
            ("amount", [1]),
            ("amount", float("nan")),
            ("amount", float("-inf")),
            ("currency", "jpy"),
            ("currency", {}),
            ("sku", ""),
            ("sku", 5),
            ("colour", "red"),
        ]
    ),
    *(
        ("POST", "/orders", content, JSON)
        for content in [
            b"",
            b"{}",
            b"null",
            b"[]",
            b"{",
            b"no",
            b'"text"',
            b"[" * 60_000,
            b"\xff\xfe",
            b'{"id": "a", "id": "a"}',
            b'{"id": "\xed\xa0\x80"}',
            b'{"\\ud800": 1}',
            b'{"qty": ' + b"9" * 60_000 + b"}",
            b" " * 70_000,
            b" " * 2_000_000,
        ]
    ),
    ("POST", "/orders", chunks, JSON),
    *(
        ("POST", "/orders", body(id="typed"), {"content-type": kind})
        for kind in [
            "text/plain",
            "application/json; charset=latin-1",
            'Application/JSON; charset="UTF-8"',
            "",
            "application/xml",
        ]
    ),
    ("POST", "/orders", body(id="packed"), JSON | {"content-encoding": "gzip"}),
    ("POST", "/orders", body(id="untyped"), {}),
]


def application(url: str, tmp_path: Path, database: Database, *, straight: bool) -> FastAPI:
    app = program.application(Settings.from_env({"DATABASE_URL": url, "SAISEI_HOME": str(tmp_path)}), database)
    assert [each.cls for each in app.user_middleware] == [_Straight]
    if not straight:
        app.user_middleware.clear()
    return app


@asynccontextmanager
async def both(
    tmp_path: Path, open_database: Callable[..., Database]
) -> AsyncIterator[list[tuple[httpx.AsyncClient, Database]]]:
    """The API past the routing and through it, each with a database of its own."""
    number = next(_number)
    ways = []
    for straight in (True, False):
        url = f"sqlite:///{tmp_path / f'{number}-{straight}.db'}"
        database = open_database(url)
        app = application(url, tmp_path, database, straight=straight)
        ways.append((app, database))
    one, other = ways
    async with one[0].router.lifespan_context(one[0]), other[0].router.lifespan_context(other[0]):
        clients = []
        for app, database in ways:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            clients.append((httpx.AsyncClient(transport=transport, base_url="http://saisei"), database))
        yield clients


async def answer(client: httpx.AsyncClient, request: tuple[str, str, Any, dict[str, str]]) -> tuple[Any, ...]:
    method, path, content, headers = request
    response = await client.request(method, path, content=content() if callable(content) else content, headers=headers)
    return response.status_code, sorted(response.headers.items()), response.content


@pytest.fixture(autouse=True)
def one_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer tells when its order was placed."""
    monkeypatch.setattr("intake.now_ms", lambda: 1_764_527_400_123)


@pytest.mark.parametrize("state", ["OPEN", "PAUSED"])
async def test_each_request_has_one_answer_whichever_way_it_goes(
    tmp_path: Path, open_database: Callable[..., Database], state: str
) -> None:
    async with both(tmp_path, open_database) as ways:
        for client, database in ways:
            await answer(client, REQUESTS[0])
            with database.write() as connection:
                connection.execute(
                    sa.update(control).values(intake=state, paused_by="rebuild-1" if state == "PAUSED" else None)
                )
        seen = set()
        for request in REQUESTS:
            past, through = [await answer(client, request) for client, _ in ways]
            assert past == through, request[:2]
            seen.add(past[0])
    expected = {200, 201, 400, 404, 405, 409, 413, 415, 422} | ({503} if state == "PAUSED" else set())
    assert seen == (expected - {201} if state == "PAUSED" else expected)


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), sa.exc.OperationalError("x", None, Exception())])
async def test_what_nobody_expected_has_one_answer_too(
    tmp_path: Path, open_database: Callable[..., Database], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with both(tmp_path, open_database) as ways:
        monkeypatch.setattr("http_api.orders_desk.OrdersDesk.place", fail)
        past, through = [await answer(client, REQUESTS[0]) for client, _ in ways]
    assert past == through
    assert past[0] in (500, 503)


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just([]))


async def test_any_fields_have_one_answer(tmp_path: Path, open_database: Callable[..., Database]) -> None:
    async with both(tmp_path, open_database) as ways:
        asked: list[bytes] = []

        @settings(max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.dictionaries(st.sampled_from([*order(1), "colour"]), _VALUES),
            st.sampled_from([{}, order(1), order(2)]),
        )
        def collect(fields: dict[str, Any], base: dict[str, Any]) -> None:
            asked.append(json.dumps(base | fields).encode())

        collect()
        for content in asked:
            past, through = [await answer(client, ("POST", "/orders", content, JSON)) for client, _ in ways]
            assert past == through, content

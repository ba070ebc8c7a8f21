"""Each answer and each error of the API, as a caller sees them."""

import http.client
import json
import threading
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.orders import parse_order
from http_api.body import parse_object
from store.engine import Database
from store.orders import get_order
from store.schema import control, orders, outbox
from tests.http.server import Api, database_of, order, problem, running
from tests.waiting import wait_until

ODD_IDS = [
    "a/b",
    "/a",
    "a/",
    "a//b",
    "a b",
    "50%",
    "a%2Fb",
    "a?b=c#d",
    "注文-七",
    "🙂",
    "x" * 200,
    "order-1:placed",
    "a;b,c",
]


def test_an_order_is_created_once_and_answered_with_the_same_bytes_ever_after(api: Api) -> None:
    first = api.place(order(1))
    assert first.status_code == 201
    assert first.headers["content-type"] == "application/json"
    document = first.json()
    assert {name: document[name] for name in order(1)} == order(1)
    assert document["placed_at"].endswith("Z")
    again = api.send(json.dumps(order(1), indent=3, sort_keys=True).encode())
    assert again.status_code == 200
    assert again.content == first.content == api.client.get("/orders/order-1").content
    assert parse_order(order(1)).id == document["id"]


def test_other_content_under_a_known_id_is_a_conflict_and_changes_nothing(api: Api) -> None:
    assert api.place(order(2)).status_code == 201
    document = problem(api.place(order(2, amount=7)), 409)
    assert document["type"] == "urn:saisei:problem:conflict"
    assert "order-2" in document["detail"]
    assert api.client.get("/orders/order-2").json()["amount"] == 200


@pytest.mark.parametrize("name", ODD_IDS)
def test_an_id_of_any_accepted_characters_is_found_under_its_address(api: Api, name: str) -> None:
    placed = api.place(order(3, id=name))
    assert placed.status_code == 201
    found = api.client.get(f"/orders/{quote(name, safe='')}")
    assert found.status_code == 200
    assert found.content == placed.content


@pytest.mark.parametrize("path", ["nobody", "", "%00", "%0A", "%ff", "%ED%A0%80", "a%20", "x" * 5000])
def test_an_order_that_is_not_there_is_not_found(api: Api, path: str) -> None:
    problem(api.client.get(f"/orders/{path}"), 404)


def test_an_order_has_one_address_and_the_id_of_its_event_is_none(api: Api) -> None:
    assert api.place(order(4)).status_code == 201
    problem(api.client.get("/orders/order-4:placed"), 404)


def test_what_is_no_order_is_refused_with_each_field(api: Api) -> None:
    document = problem(api.place({"id": " ", "qty": True, "amount": 0, "currency": [], "colour": 1}), 422)
    assert document["type"] == "urn:saisei:problem:invalid-order"
    assert set(document["fields"]) == {"id", "sku", "qty", "amount", "currency", "colour"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 60_000, 400),
        (b'{"id": NaN}', 400),
        (b'{"qty": -Infinity}', 400),
        (b'{"qty": 01}', 400),
        (b'\xef\xbb\xbf{"id": "bom"}', 400),
        (b"\xff\xfe{\x00}\x00", 400),
        (b'{"id": "\xed\xa0\x80"}', 400),
        (json.dumps(order(5)).encode("utf-16"), 400),
        (b"null", 422),
        (b"[1]", 422),
        (b'"order"', 422),
        (b'{"id": "a", "id": "a"}', 422),
        (b'{"a": {"b": 1, "b": 2}}', 422),
        (b'{"\\ud800": 1, "id": "\\udfff"}', 422),
        (b'{"qty": ' + b"9" * 60_000 + b"}", 422),
        (b"{" + b'"":0,' * 13_000 + b'"":0}', 422),
        (json.dumps(order(5, qty=1.0)).encode(), 422),
        (json.dumps(order(5, amount=1e2)).encode(), 422),
        (json.dumps(order(5, amount="500")).encode(), 422),
        (json.dumps(order(5, amount=10**12 + 1)).encode(), 422),
        (json.dumps(order(5, id="a\u0000b")).encode(), 422),
        (json.dumps(order(5, id="x" * 201)).encode(), 422),
        (json.dumps(order(5, currency="jpy")).encode(), 422),
    ],
)
def test_a_body_that_is_no_order_is_refused(api: Api, body: bytes, status: int) -> None:
    problem(api.send(body), status)


def test_a_body_must_be_declared_as_plain_json_in_utf_8(api: Api) -> None:
    body = json.dumps(order(6)).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""):
        problem(api.send(body, **{"content-type": kind}), 415)
    problem(api.client.post("/orders", content=body), 415)
    problem(api.send(body, **{"content-encoding": "gzip"}), 415)
    assert api.send(body, **{"content-type": 'Application/JSON; charset="UTF-8"'}).status_code == 201


@pytest.mark.parametrize("size", [64 * 1024 + 1, 300_000, 3_000_000])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_large_is_refused_however_it_is_sent(api: Api, size: int, declared: bool) -> None:
    body = b" " * size
    content = body if declared else iter([body[i : i + 8192] for i in range(0, size, 8192)])
    try:
        response = api.client.post("/orders", content=content, headers={"content-type": "application/json"})
    except OSError:  # pragma: no cover - the sender of far too much may find the connection closed
        assert size > 1024 * 1024
        return
    problem(response, 413)
    assert api.client.get("/livez").status_code == 200


def test_a_body_of_the_full_size_is_read(api: Api) -> None:
    body = json.dumps(order(7)).encode()
    assert api.send(body + b" " * (64 * 1024 - len(body))).status_code == 201


def test_unknown_paths_and_methods_are_problems_too(api: Api) -> None:
    problem(api.client.get("/nowhere"), 404)
    problem(api.client.get("/sales/"), 404)
    response = api.client.get("/orders")
    problem(response, 405)
    assert response.headers["allow"] == "POST"
    problem(api.client.delete("/sales"), 405)


def test_health_checks_may_use_head(api: Api) -> None:
    for path in ("/livez", "/readyz", "/sales"):
        response = api.client.head(path)
        assert response.status_code == 200
        assert response.content == b""


def test_a_caller_that_hangs_up_leaves_no_trace(api: Api) -> None:
    before = api.log()
    host, port = api.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.putrequest("POST", "/orders")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"id":')
    connection.close()
    assert api.client.get("/livez").status_code == 200
    assert api.log() == before


def test_the_schema_describes_the_order_by_its_real_bounds(api: Api) -> None:
    schema = api.client.get("/openapi.json").json()
    described = schema["components"]["schemas"]["Order"]
    assert set(described["required"]) == set(order(1))
    assert described["properties"]["amount"]["maximum"] == 10**12
    assert set(schema["paths"]) == {"/orders", "/orders/{order_id}", "/sales", "/status", "/livez", "/readyz"}
    assert {"200", "201", "400", "408", "409", "413", "415", "422", "503"} == set(
        schema["paths"]["/orders"]["post"]["responses"]
    )
    for name in json.dumps(schema).split("#/components/schemas/")[1:]:
        assert name.partition('"')[0] in schema["components"]["schemas"]


def test_an_acknowledged_order_is_readable_by_another_process_at_once(api: Api) -> None:
    with database_of(api.home) as database:
        for number in range(10, 30):
            assert api.place(order(number)).status_code == 201
            with database.read() as connection:
                assert get_order(connection, f"order-{number}").order.amount == 100 * number


def at_once(api: Api, bodies: list[dict[str, object]]) -> list[int]:
    """The status of each, placed by a thread each at the same moment; all connections are open before."""
    gate = threading.Barrier(len(bodies))
    answers: list[httpx.Response] = []

    def place(body: dict[str, object]) -> None:
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as client:
            client.get("/livez")
            gate.wait()
            answers.append(client.post("/orders", json=body))

    threads = [threading.Thread(target=place, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [answer.text for answer in answers if answer.status_code >= 500]
    return sorted(answer.status_code for answer in answers)


def rows_of(api: Api, order_id: str) -> tuple[int, int]:
    """How many rows the order has, and its event."""
    with database_of(api.home) as database, database.read() as connection:
        count = sa.select(sa.func.count())
        return (
            connection.execute(count.select_from(orders).where(orders.c.id == order_id)).scalar_one(),
            connection.execute(count.select_from(outbox).where(outbox.c.event_id == f"{order_id}:placed")).scalar_one(),
        )


def test_sixteen_callers_with_the_same_order_create_it_once(api: Api) -> None:
    assert at_once(api, [order(40)] * 16) == [200] * 15 + [201]
    assert rows_of(api, "order-40") == (1, 1)


def test_of_sixteen_callers_with_different_content_one_wins(api: Api) -> None:
    assert at_once(api, [order(41, amount=n) for n in range(1, 17)]) == [201] + [409] * 15
    assert rows_of(api, "order-41") == (1, 1)


def test_sales_and_status_tell_of_one_instant(api: Api) -> None:
    sales = api.client.get("/sales").json()
    assert sales == {"generation": "initial", "orders": 0, "totals": {}}
    status = api.client.get("/status").json()
    assert status["orders"] == sum(status["outbox"].values()) > 0
    assert status["intake"] == {"state": "OPEN", "paused_by": None}
    assert status["generation"] == {"active": sales["generation"], "epoch": 0, "totals": sales["totals"]}


def test_a_paused_intake_refuses_new_orders_only_and_takes_them_once_resumed(tmp_path: Path) -> None:
    with running(tmp_path / "home") as api, database_of(api.home) as database:
        first = api.place(order(1))
        set_intake(database, "PAUSED", "rebuild-1")
        document = problem(api.place(order(2)), 503)
        assert document["detail"] == "order intake paused"
        assert document["type"] == "urn:saisei:problem:intake-paused"
        assert rows_of(api, "order-2") == (0, 0)
        again = api.place(order(1))
        assert (again.status_code, again.content) == (200, first.content)
        problem(api.place(order(1, qty=2)), 409)
        assert api.client.get("/status").json()["intake"] == {"state": "PAUSED", "paused_by": "rebuild-1"}
        assert api.client.get("/readyz").status_code == 200
        set_intake(database, "OPEN", None)
        assert api.place(order(2)).status_code == 201


def set_intake(database: Database, state: str, by: str | None) -> None:
    with database.write() as connection:
        connection.execute(sa.update(control).values(intake=state, paused_by=by))


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(st.characters(categories=["Cs"]))
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
near_orders = st.fixed_dictionaries(
    {},
    optional={name: values | st.just(value) for name, value in order(1).items()} | {"more": values},
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300)
    | near_orders.map(lambda fields: json.dumps(fields).encode())
    | values.map(lambda value: json.dumps(value).encode())
)
def test_junk_is_refused_and_breaks_nothing(api: Api, body: bytes) -> None:
    response = api.send(body)
    if response.status_code in (200, 201, 409):
        assert parse_order(parse_object(body))
    else:
        problem(response, response.status_code)
        assert response.status_code in (400, 422)


def test_an_unexpected_failure_is_a_bare_500_and_leaves_the_reason_in_the_log(tmp_path: Path) -> None:
    program = (
        "import sys, http_api.app\n"
        "def broken(connection): raise ValueError('the secret reason')\n"
        "http_api.app.sales_document = broken\n"
        "import api, config; config.end(api.main())\n"
    )
    with running(tmp_path / "home", program) as api:
        document = problem(api.client.get("/sales"), 500)
        assert "secret" not in json.dumps(document)
        wait_until(lambda: "the secret reason" in api.log(), 60, "the reason is logged")
        assert api.client.get("/status").status_code == 200

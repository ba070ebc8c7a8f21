"""The schema tells the truth about the answers, and the API and the command line show the same documents."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.events import ORDER_PLACED
from store.clock import now_ms
from store.deliveries import next_batch, record_failure
from store.fanout import register_deliveries
from store.faults import set_fault
from store.jobs import begin_job, end_job
from store.rebuild import begin_rebuild
from store.receivers import hold_receiver, note_progress, register_receiver
from store.stalls import STALL_MS
from tests.http.server import ROOT, Api, database_of, environment, order, running

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def differences(value: Any, schema: dict[str, Any], schemas: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Where `value` is not as the schema describes it, or holds what the schema does not describe."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, _TYPES[name]) and isinstance(value, bool) == (name == "boolean") for name in names):
        yield f"{at} is {value!r}, not {names}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is {value!r}"
    if value is not None and ("minimum" in schema and value < schema["minimum"]):
        yield f"{at} is {value!r}, below {schema['minimum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from differences(item, schema["items"], schemas, f"{at}[{number}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        yield from (f"{at}.{name} is missing" for name in set(schema.get("required", [])) - set(value))
        for name, item in value.items():
            other = schema.get("additionalProperties", False)
            if name in properties or isinstance(other, dict):
                yield from differences(item, properties.get(name, other), schemas, f"{at}.{name}")
            elif other is not True:
                yield f"{at}.{name} is not described"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API whose database has some of everything that its status can show."""
    with running(tmp_path_factory.mktemp("busy") / "home") as api, database_of(api.home) as database:
        for number in range(1, 6):
            assert api.place(order(number)).status_code == 201
        old = now_ms() - 2 * STALL_MS
        with database.write() as connection:
            register_receiver(connection, "late", [ORDER_PLACED])
            register_deliveries(connection, [1, 2, 3], old)
            hold_receiver(connection, "mail", "no route", old)
            note_progress(connection, "sales", old)
            set_fault(connection, "billing", "error")
            for position, due in ((1, old + 5), (2, None)):
                assert position in next_batch(connection, "sales", 10).positions
                record_failure(connection, "sales", position, attempts=1, error="x: y", next_attempt_at=due, now=old)
            for name in ("job-1", "job-2"):
                begin_job(connection, name, 100, old, old)
            end_job(connection, "job-2", "it failed")
            begin_rebuild(connection, "run-1", kind="rebuild", target=None, resume=False, now=old)
        yield api


def on_the_command_line(api: Api, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "starter.py", *words, "--json"],
        cwd=ROOT,
        env=environment(api.home),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_status_is_one_document_on_the_command_line_and_over_http(busy: Api) -> None:
    command = on_the_command_line(busy, "status")
    answer = busy.client.get("/status").json()
    # What only other servers can tell is the command's own: the API's answer needs the database alone.
    assert set(command) - set(answer) == {"redis", "worker"}
    assert set(answer) <= set(command)
    clocks = ("oldest_seconds", "oldest_dead_seconds")
    for name, receiver in answer["receivers"].items():
        for clock in clocks:
            there, here = receiver.pop(clock), command["receivers"][name].pop(clock)
            assert (there is None) == (here is None)
            assert there is None or 0 <= there - here < 60
    for field in answer:
        assert answer[field] == command[field], field
    # And it is not empty where it could be.
    assert [answer["receivers"][name]["held"] for name in ("mail", "sales")] == [3, 0]
    sales = answer["receivers"]["sales"]
    assert (sales["pending"], sales["retrying"], sales["dead"]) == (1, 1, 1)
    assert answer["receivers"]["billing"]["fault"] == "error"
    assert answer["jobs"] == {"FAILED": 1, "RUNNING": 1}
    assert answer["rebuild"]["rebuild"] == "rebuild-1"
    assert {stall["stage"] for stall in answer["stalls"]} >= {"mail", "sales"}
    assert answer["intake"] == {"state": "PAUSED", "paused_by": "rebuild-1"}


def test_an_order_is_one_document_on_the_command_line_and_over_http(busy: Api) -> None:
    shown = on_the_command_line(busy, "orders", "show", "order-2")
    answer = busy.client.get("/orders/order-2").json()
    assert {name: shown[name] for name in answer} == answer
    assert set(shown) - set(answer) == {"event"}


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/orders/order-2", "/orders/{order_id}"),
        ("/sales", "/sales"),
        ("/status", "/status"),
        ("/livez", "/livez"),
        ("/readyz", "/readyz"),
        ("/orders/nobody", "/orders/{order_id}"),
    ],
)
def test_an_answer_is_as_the_schema_describes_it(busy: Api, path: str, route: str) -> None:
    document = busy.client.get("/openapi.json").json()
    response = busy.client.get(path)
    described = document["paths"][route]["get"]["responses"][str(response.status_code)]["content"]
    schema = described[response.headers["content-type"]]["schema"]
    assert list(differences(response.json(), schema, document["components"]["schemas"])) == []


def test_each_example_is_as_its_schema_describes_it(busy: Api) -> None:
    schemas = busy.client.get("/openapi.json").json()["components"]["schemas"]
    for name, schema in schemas.items():
        assert list(differences(schema["example"], schema, schemas)) == [], name


def test_every_successful_answer_has_a_schema(busy: Api) -> None:
    for route, operations in busy.client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            good = [code for code in operation["responses"] if code.startswith("2")]
            assert good, route
            for code in good:
                content = operation["responses"][code]["content"]["application/json"]
                assert content["schema"]["$ref"], (method, route, code)


def test_a_difference_is_found() -> None:
    schemas = {"Inner": {"type": "object", "required": ["n"], "properties": {"n": {"type": ["integer", "null"]}}}}
    schema = {"type": "array", "items": {"$ref": "#/components/schemas/Inner"}}
    assert list(differences([{"n": 1}, {"n": None}], schema, schemas)) == []
    for wrong in ({"n": True}, {"n": "1"}, {}, {"n": 1, "m": 1}, []):
        assert len(list(differences([wrong], schema, schemas))) == 1, wrong

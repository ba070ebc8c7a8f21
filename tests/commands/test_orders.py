"""`init`, `orders`, `status`, `queues`, `links` on a running stack."""

from collections.abc import Mapping
from typing import Any

import pytest
import redis

from embedded import Stack
from store.deliveries import deliveries_of
from store.engine import Database
from store.outbox import find_event
from store.schema import metadata
from tests.commands.cli import Cli
from tests.commands.conftest import Inside
from tests.waiting import wait_until


def states_of(cli: Cli, order: str) -> set[str]:
    """Read from the database: polling by commands would take a process each time."""
    database = Database(f"sqlite:///{cli.home / 'saisei.db'}")
    try:
        with database.read() as connection:
            found = deliveries_of(connection, f"{order}:placed")
            return {f"{delivery.receiver} {delivery.status}" for delivery in found}
    finally:
        database.close()


ALL_DONE = {"billing done", "mail done", "sales done"}


def effects(database: Database) -> Mapping[str, int]:
    with database.read() as connection:
        return {
            table: connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one()
            for table in ("orders", "outbox", "deliveries", "billing_entries", "mail_messages", "sales_applied")
        }


def fanned_out(database: Database, event_id: str) -> bool:
    with database.read() as connection:
        return find_event(connection, event_id).fanned_out_at is not None


def jpy(status: dict[str, Any]) -> int:
    totals = status["generation"]["totals"]
    return int(totals["JPY"]["amount"]) if "JPY" in totals else 0


def test_init_changes_nothing_on_a_stack_that_is_set_up(cli: Cli) -> None:
    document = cli.json("init")
    assert document == {
        "database": "unchanged",
        "added": [],
        "receivers": ["billing", "mail", "sales"],
        "search_attributes": [],
    }
    assert cli("init").lines == [
        f"database: unchanged ({len(metadata.tables)} tables, receivers billing, mail, sales)",
        "search attributes: unchanged",
    ]


def test_orders_are_placed_once_and_reach_every_receiver(cli: Cli, stack: Stack, database: Database) -> None:
    first = cli.json("status")
    assert cli("orders", "place", "--start", "1", "--count", "12").lines == ["12 orders placed"]
    wait_until(lambda: states_of(cli, "order-12") == ALL_DONE, 60, "order-12 is at every receiver")
    again = cli("orders", "place", "--start", "1", "--count", "13")
    assert (again.exit_code, again.lines) == (0, ["1 order placed, 12 known before"])

    shown = cli.json("orders", "show", "order-7")
    assert (shown["id"], shown["amount"], shown["currency"]) == ("order-7", 700, "JPY")
    assert shown["event"]["event_id"] == "order-7:placed"
    assert shown["event"]["payload"]["order_id"] == "order-7"
    assert cli.json("orders", "show", "order-7:placed") == shown
    wait_until(lambda: states_of(cli, "order-13") == ALL_DONE, 60, "order-13 is at every receiver")

    status = cli.json("status")
    assert status["orders"] - first["orders"] == 13
    assert status["intake"] == {"state": "OPEN", "paused_by": None}
    assert status["generation"]["totals"]["JPY"]["amount"] - jpy(first) == 9100
    wait_until(lambda: cli.json("status")["worker"] == "answers", 60, "the worker answers")
    for name, receiver in status["receivers"].items():
        assert receiver["done"] - first["receivers"][name]["done"] == 13

    # The same business event four times more: nothing changes.
    before = effects(database)
    with redis.Redis.from_url(str(stack.redis_url)) as client:
        client.rpush("outbox.events", "no-event-of-ours")
        assert cli("event", "duplicate", "--order", "1", "--times", "3").lines == ["order-1:placed pushed 3 times more"]
        assert cli.json("event", "duplicate", "--order", "order-1") == {"event_id": "order-1:placed", "pushed": 1}
        wait_until(lambda: client.llen("outbox.events") == 0, 60, "the list is drained")
    assert effects(database) == before

    queues = cli.json("queues")
    assert queues["list"] == queues["in_flight"] == queues["pending"] == 0
    assert queues["processed"] >= 13
    assert [entry["entry"] for entry in queues["invalid_entries"]] == ["no-event-of-ours"]
    assert queues["receivers"]["mail"] == {"waiting": 0, "retrying": 0, "dead": 0, "held": False}
    summary = cli("queues", "--summary")
    assert "no-event-of-ours" not in summary.stdout
    assert "outbox.events  0 entries, 0 events in flight" in summary.lines

    assert cli("event", "publish", "order-1").lines == ["order-1:placed goes through the pipeline again"]
    wait_until(lambda: fanned_out(database, "order-1:placed"), 60, "it is fanned out again")
    assert effects(database) == before


def own(**fields: str) -> list[str]:
    values = {"id": "[A-7]:smile:", "sku": "tea", "qty": "2", "amount": "1980", "currency": "JPY", **fields}
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def test_an_order_of_ones_own_is_shown_as_it_was_placed(cli: Cli) -> None:
    assert cli("orders", "place", *own()).lines == ["1 order placed"]
    assert "id         [A-7]:smile:" in cli("orders", "show", "[A-7]:smile:").lines
    cli("orders", "place", *own(qty="3")).refused("was placed before with other content")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qty": "0"}, ["qty: must be from 1"]),
        ({"qty": "two", "amount": "0"}, ["qty: must be an integer", "amount: must be from 1"]),
        ({"currency": "YEN", "amount": "1" * 30}, ["currency: must be", "amount: must be"]),
        ({"id": " x"}, ["id: must not begin"]),
    ],
)
def test_a_bad_order_is_refused_with_its_fields_named(
    cli: Cli, inside: Inside, fields: dict[str, str], words: list[str]
) -> None:
    inside(cli, "orders", "place", *own(**fields)).refused(*words)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--sku", "tea"], "--id"),
        (["--id", "A-8"], "--sku and --amount"),
        ([*own(), "--count", "2"], "--start and --count"),
    ],
)
def test_arguments_that_make_no_sense_together_are_wrong_usage(
    cli: Cli, inside: Inside, arguments: list[str], word: str
) -> None:
    inside(cli, "orders", "place", *arguments).refused(word, code=2)


def test_links_lead_into_the_web_ui(cli: Cli, stack: Stack) -> None:
    links: dict[str, Any] = cli.json("links")
    runs = f"{stack.ui_url}/namespaces/default/workflows"
    assert links["receiver/mail"] == f"{runs}/receiver%2Fmail"
    assert links["failing at mail"].startswith(f"{runs}?query=WorkflowType%3D%22DeliveryWorkflow%22")
    assert all(link.startswith(runs) for link in links.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ("orders", "show", "nothing"),
        ("event", "show", "nothing"),
        ("event", "publish", "nothing"),
        ("event", "duplicate", "--order", "99999"),
        ("event", "deliver", "mail", "nothing"),
        ("job", "show", "nothing"),
    ],
)
def test_what_does_not_exist_is_named(cli: Cli, inside: Inside, arguments: tuple[str, ...]) -> None:
    inside(cli, *arguments, "--json").refused("there is no")


def test_a_receiver_that_does_not_exist_is_told_with_those_that_do(cli: Cli, inside: Inside) -> None:
    inside(cli, "event", "deliver", "post", "order-1").refused(
        "there is no receiver post; there are billing, mail, sales"
    )


def test_an_entry_that_is_no_event_is_kept_and_shown_in_short(cli: Cli, stack: Stack) -> None:
    with redis.Redis.from_url(str(stack.redis_url)) as client:
        client.rpush("outbox.events", "junk " * 1000)
    assert cli("orders", "place", "--start", "61").exit_code == 0  # wakes the fan-out

    def kept() -> list[str]:
        entries = [each["entry"] for each in cli.json("queues")["invalid_entries"]]
        return [entry for entry in entries if entry.startswith("junk ")]

    wait_until(kept, 60, "the entry is kept")
    assert kept() == [("junk " * 1000)[:600]]
    lines = cli("queues").lines
    assert any(line.startswith("junk junk") for line in lines)
    assert max(map(len, lines)) < 260

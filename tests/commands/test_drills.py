"""`fault`, what `status` says of it, and `audit`."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client

from embedded import Stack
from store.engine import Database
from store.faults import clear_fault
from tests.commands.cli import Cli
from tests.commands.conftest import Inside
from tests.commands.test_orders import ALL_DONE, states_of
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def works_again(database: Database) -> Iterator[None]:
    """The stack is shared: whatever a test did, its receivers work after it."""
    yield
    with database.write() as connection:
        for receiver in ("billing", "mail", "sales"):
            clear_fault(connection, receiver)


def place(inside: Inside, cli: Cli, order: str) -> None:
    assert inside(cli, "orders", "place", "--id", order, "--sku", "tea", "--amount", "7").exit_code == 0


def test_an_outage_holds_the_receiver_and_its_end_lets_it_go_on(cli: Cli, inside: Inside) -> None:
    begun = time.monotonic()
    on = inside(cli, "fault", "on", "--receiver", "mail", "--mode", "outage")
    assert on.lines == ["mail is unavailable until `fault off --receiver mail`"]
    place(inside, cli, "held")
    others = {"billing done", "mail pending", "sales done"}
    wait_until(lambda: states_of(cli, "held") == others, 60, "the others have it")
    wait_until(lambda: inside(cli, "status", "--json").json["receivers"]["mail"]["held"], 60, "mail is on hold")
    status = inside(cli, "status", "--json").json
    mail = status["receivers"]["mail"]
    assert (mail["held"], mail["pending"], mail["retrying"], mail["fault"]) == (1, 0, 0, "outage")
    assert mail["held_since"]
    assert "mail is switched off" in mail["reason"]
    assert 0 <= mail["oldest_seconds"] <= time.monotonic() - begun + 1
    assert status["stalls"] == []  # not for a minute yet
    assert "mail is switched off (fault on --mode outage); drill switch is on: outage" in inside(cli, "status").stdout
    assert inside(cli, "fault", "off", "--receiver", "mail").lines == ["mail works again"]
    wait_until(lambda: states_of(cli, "held") == ALL_DONE, 60, "mail has it too")
    off = inside(cli, "fault", "off", "--receiver", "mail", "--json").json
    assert off == {"receiver": "mail", "mode": None, "changed": False}


def test_an_error_fails_each_event_and_the_receivers_run_says_what_waits(
    cli: Cli, inside: Inside, stack: Stack
) -> None:
    on = inside(cli, "fault", "on", "--receiver", "billing", "--json").json
    assert on == {"receiver": "billing", "mode": "error"}
    place(inside, cli, "failing")
    wait_until(lambda: "billing retrying" in states_of(cli, "failing"), 60, "it is retried")
    assert "drill switch is on: error" in inside(cli, "status").stdout

    async def details() -> str:
        client = await Client.connect(str(stack.temporal_address))
        handle = client.get_workflow_handle("receiver/billing")
        answer = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
        return str(answer.current_details)

    said = wait_until(
        lambda: (text := asyncio.run(details())) and "failing:placed waits at billing" in text and text,
        20,
        "the run of billing says what waits",
    )
    assert "failed: InjectedFault: billing is switched to fail (fault on)" in said
    inside(cli, "fault", "off", "--receiver", "billing")
    wait_until(lambda: states_of(cli, "failing") == ALL_DONE, 60, "billing has it too")


def test_a_receiver_that_is_not_there_is_refused(cli: Cli, inside: Inside) -> None:
    for word in ("on", "off"):
        inside(cli, "fault", word, "--receiver", "nobody").refused(
            "there is no receiver nobody; there are billing, mail"
        )


def test_a_mode_that_is_none_is_wrong_usage(inside: Inside, nothing: Cli) -> None:
    assert inside(nothing, "fault", "on", "--mode", "slow").exit_code == 2


def test_an_audit_of_a_working_shop_is_clean(cli: Cli, inside: Inside) -> None:
    place(inside, cli, "audited")
    wait_until(lambda: states_of(cli, "audited") == ALL_DONE, 60, "it is at every receiver")
    found = inside(cli, "audit", "--json")
    assert found.exit_code == 0, found
    document = found.json
    assert (document["clean"], document["breaks"]) == (True, [])
    assert document["checked"] == ["I1", "I2", "I3", "I4", "I5", "I6"]
    sales = document["receivers"]["sales"]
    assert sales["events"] == document["orders"] == sum(sales.values()) - sales["events"]
    assert inside(cli, "audit").lines[-1] == "clean: I1, I2, I3, I4, I5, I6 hold"


def test_a_break_is_named_and_the_exit_code_is_1(inside: Inside, nothing: Cli) -> None:
    inside(nothing, "init")
    inside(nothing, "orders", "place", "--count", "25")
    database = Database(f"sqlite:///{nothing.home / 'saisei.db'}")
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM orders WHERE id <> 'order-1'")
    database.close()
    found = inside(nothing, "audit")
    assert found.exit_code == 1
    assert found.lines[-1].startswith("I1 broken: order-placed events without their order (24): order-2:placed, ")
    assert found.lines[-1].endswith(" and 4 more")
    document = inside(nothing, "audit", "--json")
    assert document.exit_code == 1
    (broken,) = document.json["breaks"]
    assert (broken["invariant"], broken["count"], len(broken["ids"])) == ("I1", 24, 20)

"""`event deliver`: one attempt by hand, whose failure leaves the delivery as it was."""

import pytest

from store.engine import Database
from tests.commands.cli import Cli
from tests.commands.test_orders import ALL_DONE, states_of
from tests.waiting import wait_until


@pytest.fixture
def retrying(cli: Cli, database: Database) -> str:
    """An order whose mail failed once and is due again in a year."""
    cli("orders", "place", "--id", "by-hand", "--sku", "tea", "--amount", "5")
    wait_until(lambda: states_of(cli, "by-hand") == ALL_DONE, 60, "the order is at every receiver")
    where = "position = (SELECT position FROM outbox WHERE event_id = 'by-hand:placed')"
    with database.write() as connection:
        connection.exec_driver_sql(f"DELETE FROM mail_messages WHERE {where}")
        connection.exec_driver_sql(
            "UPDATE deliveries SET status = 'retrying', attempts = 1, last_error = 'it was down', has_run = 1, "
            f"next_attempt_at = 4000000000000 WHERE receiver = 'mail' AND {where}"
        )
    return "by-hand"


def test_a_failure_by_hand_retains_the_state_and_a_success_ends_it(cli: Cli, database: Database, retrying: str) -> None:
    failed = cli("event", "deliver", "mail", retrying, "--fail")
    assert (failed.exit_code, failed.lines) == (1, ["mail: failed; retrying retained"])
    assert failed.stderr == "DrillFailure: mail was told to fail\n"
    mail = cli.json("event", "show", retrying)["deliveries"][1]
    assert (mail["state"], mail["attempts"], mail["last_error"]) == ("retrying", 1, "it was down")
    assert mail["next_attempt_at"] == "2096-10-02T07:06:40.000Z"

    document = cli.json("event", "deliver", "mail", f"{retrying}:placed")
    assert (document["outcome"], document["state"]) == ("delivered", "done")
    assert cli("event", "deliver", "mail", retrying).lines == ["mail: done"]

    with database.write() as connection:
        connection.exec_driver_sql(
            "UPDATE deliveries SET status = 'dead', attempts = 5 WHERE receiver = 'mail' AND position = "
            "(SELECT position FROM outbox WHERE event_id = 'by-hand:placed')"
        )
    cli("event", "deliver", "mail", retrying).refused("is a dead letter; redrive it first")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE deliveries SET status = 'done' WHERE status = 'dead'")

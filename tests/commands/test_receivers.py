"""`receivers list` and `receivers end`, on a home where a receiver was taken out of the registry."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError

import embedded
from commands.stack import worker_child
from contracts import search
from contracts.events import ORDER_PLACED
from contracts.messages import DeliveryInput
from contracts.names import delivery_id, receiver_id
from runs.starts import Runs
from store.clock import now_ms
from store.deliveries import claim_runs, record_failure
from store.engine import Database
from store.receivers import hold_receiver, register_receiver
from tests.commands.cli import ROOT, STARTER, Cli, CliResult
from tests.commands.conftest import Inside
from tests.store.scenes import place, publish, spread

END = ("receivers", "end", "fax", "--reason", "nobody has one")


def add_fax(home: Path) -> Database:
    """Orders 1 to 4 at `fax`, which no registry names: the first fails, the second is dead, two are pending."""
    database = Database(f"sqlite:///{home / 'saisei.db'}")
    with database.write() as connection:
        register_receiver(connection, "fax", [ORDER_PLACED])
    place(database, 1, 2, 3, 4)
    spread(database, *publish(database, now_ms()), now=now_ms())
    with database.write() as connection:
        for position, due in ((1, now_ms()), (2, None)):
            record_failure(connection, "fax", position, attempts=1, error="no tone", next_attempt_at=due, now=now_ms())
        claim_runs(connection, "fax", 10, now=now_ms(), overdue=0)
    return database


@pytest.fixture
def shop(nothing: Cli) -> Iterator[Cli]:
    assert nothing("init").exit_code == 0
    database = add_fax(nothing.home)
    with database.write() as connection:
        hold_receiver(connection, "fax", "engaged", now_ms())
    yield nothing
    database.close()


def fax(cli: Cli) -> dict[str, object]:
    (found,) = [each for each in cli.json("receivers", "list") if each["receiver"] == "fax"]
    return found


def test_the_list_shows_what_each_takes_and_what_waits_there(shop: Cli) -> None:
    found = fax(shop)
    assert (found["state"], found["in_registry"], found["takes"]) == ("subscribed", False, {ORDER_PLACED: 0})
    assert [found[state] for state in ("pending", "retrying", "held", "dead")] == [0, 1, 2, 1]
    lines = shop("receivers", "list").lines
    assert [line.split()[0] for line in lines] == ["receiver", "billing", "fax", "mail", "sales"]
    assert lines[2].endswith("not in the registry; `receivers end` ends it")
    assert not lines[1].endswith("ends it")


def test_one_in_the_registry_that_no_worker_has_met_is_listed_too(nothing: Cli, inside: Inside) -> None:
    database = Database(f"sqlite:///{nothing.home / 'saisei.db'}")
    assert inside(nothing, "init").exit_code == 0
    with database.write() as connection:
        for table in ("receivers", "subscriptions"):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE receiver = 'mail'")
    database.close()
    assert [each["state"] for each in nothing.json("receivers", "list")] == ["subscribed", "subscribed", "new"]
    assert nothing("receivers", "list").lines[-1].endswith("the next start of the worker registers it")


def test_one_in_the_registry_is_not_ended(shop: Cli) -> None:
    shop("receivers", "end", "mail", "--reason", "x").refused("mail is in receivers/registry.py", "take it out there")
    shop("receivers", "end", "telex", "--reason", "x").refused("there is no receiver telex")
    shop("receivers", "end", "fax", "--reason", " ").refused("must say why the receiver is ended")
    assert fax(shop)["state"] == "subscribed"


def test_what_it_has_not_taken_is_waived_and_the_audit_is_clean(shop: Cli) -> None:
    ended = shop(*END)
    assert ended.exit_code == 0, ended
    assert ended.stdout.startswith("fax was ended by ")
    assert ended.stdout.endswith(": nobody has one (4 events waived there in all)\n")
    assert ended.stderr.startswith("nothing is lost, it goes on once Temporal is back: no Temporal server is running ")
    found = fax(shop)
    assert (found["state"], found["takes"], found["waived"]) == ("ended", {}, 4)
    assert [found[state] for state in ("pending", "retrying", "held", "dead")] == [0, 0, 0, 0]
    waived = shop.json("dead", "list", "--waived", "--receiver", "fax")["waived"]
    assert {each["reason"] for each in waived} == {"receiver ended: nobody has one"}
    assert "fax" not in shop.json("status")["receivers"]
    assert shop.json("audit")["clean"]
    # Again, and with another reason.
    again = shop.json(*END)
    assert (again["created"], again["waived"]) == (False, 4)
    shop(*END[:-1], "another").refused("fax was ended by", "nothing was changed")
    # What comes then is not for it.
    assert shop("orders", "place", "--start", "5").exit_code == 0
    shop("event", "deliver", "fax", "order-5").refused("order-5:placed is not for fax: fax was ended by")


def test_two_commands_at_once_end_it_once(shop: Cli) -> None:
    results: list[CliResult] = []
    threads = [threading.Thread(target=lambda: results.append(shop(*END, "--json"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.exit_code for each in results] == [0, 0], results
    assert sorted(each.json["created"] for each in results) == [False, True]
    assert fax(shop)["waived"] == 4
    assert shop.json("audit")["clean"]


def test_killed_on_the_way_the_same_command_goes_on(shop: Cli) -> None:
    program = (
        "import os, runpy, signal, sys\n"
        "import store.receiver_ends as ends\n"
        "ends.finish_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sys.argv = ['starter.py', *{list(END)}]\n"
        f"runpy.run_path({str(STARTER)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=shop.environment(None), timeout=120)
    assert done.returncode == -9
    found = fax(shop)
    assert (found["state"], found["waived"], found["takes"]) == ("being ended", 4, {ORDER_PLACED: 0})
    assert shop.json("audit")["clean"]
    assert shop.json(*END)["created"] is False
    assert fax(shop)["state"] == "ended"
    assert shop.json("audit")["clean"]


def test_its_runs_end(tmp_path: Path) -> None:
    """Both the long-lived one and those of failing events, on a worker that does not know the receiver."""
    cli = Cli(tmp_path / "home")
    with embedded.start(cli.home, children=[worker_child()], search_attributes=search.START_DEV) as stack:
        database = add_fax(cli.home)

        async def watch() -> None:
            client = await Client.connect(str(stack.temporal_address))
            runs = Runs(client, ("fax",))
            long_lived = client.get_workflow_handle(receiver_id("fax"))
            failing = client.get_workflow_handle(delivery_id("fax", "order-1:placed"))
            await runs.wake([receiver_id("fax")])
            await runs.start_delivery(DeliveryInput("fax", "order-1:placed", "order/order-1"))
            # Until the end both wait for a worker that knows the receiver.
            for handle in (long_lived, failing):
                while not any(
                    each.attempt > 1 for each in (await handle.describe()).raw_description.pending_activities
                ):
                    await asyncio.sleep(0.1)
            ended = await asyncio.to_thread(cli, *END)
            assert (ended.exit_code, ended.stderr) == (0, "")
            result = await failing.result()
            assert result["state"] == "waived"
            # The last of the failing ones does not bring it back. A try of its drain that falls between the end and
            # the word to the run ends it first, by itself.
            closed = (WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.FAILED)
            assert (await long_lived.describe()).status in closed
            # A worker of the old days, or Temporal's own backup, brings it back: it ends by itself, and says why.
            await runs.ensure()
            with pytest.raises(WorkflowFailureError) as failed:
                await long_lived.result()
            assert "fax was ended by" in str(failed.value.cause.__cause__)

        asyncio.run(asyncio.wait_for(watch(), 240))
        assert cli.json("audit")["clean"]
        database.close()

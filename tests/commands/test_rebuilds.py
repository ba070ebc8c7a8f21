"""`rebuild`, `execution`, `generations`, `intake` and `recover-outbox` on a running stack."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from temporalio.client import Client, WorkflowHandle

from contracts.counts import counted
from contracts.messages import RebuildInput
from contracts.names import PROCEED_SIGNAL, REBUILD_ID
from embedded import Stack
from runs.starts import Runs
from store.clock import now_ms
from store.control import resume_intake
from store.engine import Database
from store.rebuild import last_rebuild, running_rebuild
from tests.commands.cli import Cli, ended
from tests.commands.conftest import Inside
from tests.commands.test_jobs import stopped_worker
from tests.commands.test_orders import ALL_DONE, states_of
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def open_again(database: Database) -> Iterator[None]:
    """The stack is shared: whatever a test did, intake is open after it."""
    yield
    with database.write() as connection:
        resume_intake(connection)


def with_client(stack: Stack, work: Callable[[Client], Any]) -> Any:
    async def connected() -> Any:
        return await work(await Client.connect(str(stack.temporal_address)))

    return asyncio.run(connected())


def phase(database: Database) -> str | None:
    with database.read() as connection:
        rebuild = running_rebuild(connection)
        return rebuild.phase if rebuild else None


@pytest.fixture
def held(stack: Stack, database: Database) -> Iterator[Callable[[str], None]]:
    """A rebuild that stops before it seals its generation; call it with `proceed` or `cancel` to go on."""

    def run(client: Client) -> Any:
        return Runs(client, ()).start_rebuild(RebuildInput(hold=True))

    with_client(stack, run)
    wait_until(lambda: phase(database) == "reconciling", 60, "the rebuild is held")

    def go_on(how: str) -> None:
        async def tell(client: Client) -> None:
            handle: WorkflowHandle[Any, Any] = client.get_workflow_handle(REBUILD_ID)
            await (handle.cancel() if how == "cancel" else handle.signal(PROCEED_SIGNAL))

        with_client(stack, tell)
        wait_until(lambda: phase(database) is None, 60, "the rebuild is over")

    yield go_on
    if phase(database) is not None:
        go_on("cancel")


def place(cli: Cli, order: str) -> None:
    cli.json("orders", "place", "--id", order, "--sku", "tea", "--amount", "7")
    wait_until(lambda: states_of(cli, order) == ALL_DONE, 60, "the order is at every receiver")


def lose_one(database: Database, order: str) -> None:
    """An event that was pushed just now, and that Redis lost."""
    with database.write() as connection:
        connection.exec_driver_sql(f"INSERT INTO orders VALUES ('{order}', 'tea', 1, 7, 'JPY', 1)")
        payload = f'{{"amount":7,"currency":"JPY","order_id":"{order}","qty":1,"sku":"tea"}}'
        now = now_ms() + 600_000  # the look must not repair it before the test has looked
        connection.execute(
            sa.text(
                "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status, published_at, "
                f"first_published_at) VALUES ('{order}:placed', 'order/{order}', 1, 'order-placed', :payload, "
                f"'PUBLISHED', {now}, {now})"
            ),
            {"payload": payload},
        )


def test_without_a_rebuild_there_is_none_to_show(inside: Inside, nothing: Cli) -> None:
    assert inside(nothing, "init").exit_code == 0
    assert inside(nothing, "execution").lines == ["there was no rebuild yet; `rebuild` starts one"]
    assert inside(nothing, "execution", "--json").json is None
    assert inside(nothing, "rebuild").exit_code == 1
    inside(nothing, "generations", "drop", "initial").refused("initial is ACTIVE; only RETIRED and FAILED ones")
    inside(nothing, "generations", "drop", "none").refused("there is no generation none")


def test_a_rebuild_that_is_waited_for_ends_with_its_outcome(cli: Cli, inside: Inside) -> None:
    place(cli, "rebuilt")
    before = inside(cli, "status", "--json").json
    done = cli.json("rebuild", "--wait", "--resume")
    assert (done["state"], done["phase"], done["error"], done["resume"]) == ("COMPLETED", "activated", None, True)
    assert done["expected"] == done["replayed"] == done["certificate"]["orders"] == before["orders"]
    assert done["link"].endswith("/namespaces/default/workflows/rebuild%2Fsales")
    after = inside(cli, "status", "--json").json
    assert after["intake"] == {"state": "OPEN", "paused_by": None}
    assert after["generation"]["active"] == done["generation"]
    assert after["generation"]["totals"]["JPY"]["orders"] == before["orders"]
    listed = {each["generation"]: each for each in inside(cli, "generations", "list", "--json").json}
    assert listed[done["generation"]]["state"] == "ACTIVE"
    assert listed[done["generation"]]["certificate"] == done["certificate"]
    assert listed[done["base_generation"]]["state"] == "RETIRED"
    shown = inside(cli, "execution")
    assert f"rebuild      {done['rebuild']} COMPLETED" in shown.lines
    assert f"outcome      ACTIVATED: {done['generation']} is served; intake is open again" in shown.lines
    assert inside(cli, "audit").exit_code == 0


def test_one_that_no_worker_has_begun_goes_on_without_the_command(cli: Cli, stack: Stack, database: Database) -> None:
    with stopped_worker(stack):
        waiting = cli.start("rebuild", "--resume")
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "rebuild/sales: waits for a worker; `make up` starts one\n"
        result = ended(waiting, interrupt=True)
        assert (result.exit_code, result.stdout) == (130, "")
        assert result.stderr.splitlines() == [
            "rebuild/sales goes on without this command: it begins, and pauses intake, when a worker runs",
            "starter.py: interrupted",
        ]
        with database.read() as connection:
            before = last_rebuild(connection)
    with_client(stack, lambda client: client.get_workflow_handle(REBUILD_ID).result())
    with database.read() as connection:
        last = last_rebuild(connection)
    assert last is not None
    assert last != before
    assert last.state == "COMPLETED"


def test_while_one_runs_everything_says_so(
    cli: Cli, inside: Inside, database: Database, held: Callable[[str], None]
) -> None:
    shown = inside(cli, "execution", "--json").json
    assert (shown["state"], shown["phase"], shown["certificate"]) == ("RUNNING", "reconciling", None)
    link = shown["link"]
    inside(cli, "rebuild").refused(f"{shown['rebuild']} runs already: {link}")
    inside(cli, "generations", "rollback").refused(f"{shown['rebuild']} runs already: {link}")
    inside(cli, "intake", "resume").refused(f"{shown['rebuild']} runs and needs intake paused")
    paused = inside(cli, "intake", "pause", "--json").json
    assert paused == {"intake": "PAUSED", "paused_by": shown["rebuild"], "changed": False}
    inside(cli, "generations", "drop", shown["generation"]).refused("is BUILDING")
    inside(cli, "orders", "place", "--id", "late", "--sku", "tea", "--amount", "7").refused("order intake paused")
    status = inside(cli, "status", "--json").json
    assert status["rebuild"]["rebuild"] == shown["rebuild"]
    assert status["generation"]["active"] == shown["base_generation"]
    assert f"rebuild     {shown['rebuild']} runs: reconciling, " in inside(cli, "status").stdout

    held("cancel")
    failed = inside(cli, "execution", "--json").json
    assert (failed["state"], failed["error"], failed["ended_at"] is None) == ("FAILED", "it was cancelled", False)
    assert "FAILED: it was cancelled; " in inside(cli, "execution").stdout
    assert inside(cli, "intake", "resume").lines == ["intake is open again"]
    assert inside(cli, "intake", "resume").lines == ["intake is open already"]
    assert (
        inside(cli, "generations", "drop", failed["generation"])
        .lines[0]
        .startswith(f"{failed['generation']} is dropped, {counted(failed['replayed'], 'row')} removed")
    )


def test_one_that_is_not_waited_for_prints_its_id_and_a_link(cli: Cli, inside: Inside, database: Database) -> None:
    started = inside(cli, "rebuild", "--resume")
    assert started.exit_code == 0
    with database.read() as connection:
        rebuild = last_rebuild(connection)
    assert rebuild is not None
    assert started.lines[0].startswith(f"{rebuild.rebuild_id}: {rebuild.base_generation} -> {rebuild.generation}, ")
    assert started.lines[1].endswith("/workflows/rebuild%2Fsales")
    wait_until(lambda: phase(database) is None, 60, "the rebuild is over")


def test_one_that_cannot_drain_fails_by_name_and_what_redis_lost_is_recovered(
    cli: Cli, inside: Inside, database: Database
) -> None:
    lose_one(database, "lost")
    failed = inside(cli, "rebuild", "--wait", "--drain-bound", "0.3", "--json")
    assert failed.exit_code == 1
    assert failed.json["state"] == "FAILED"
    assert failed.json["error"] == "the outbox was not drained within 0.3 s; waiting: lost:placed"
    assert inside(cli, "recover-outbox", "--json").json == {"recovered": 0}  # it was pushed later than now
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE outbox SET published_at = 1 WHERE event_id = 'lost:placed'")
    recovered = inside(cli, "recover-outbox").lines  # the look may be quicker
    assert recovered in (["the relay sends 1 event again that Redis lost"], ["Redis lost nothing"])
    wait_until(lambda: states_of(cli, "lost") == ALL_DONE, 60, "the order is at every receiver")
    assert inside(cli, "status", "--json").json["intake"]["state"] == "PAUSED"
    assert inside(cli, "rebuild", "--wait", "--resume", "--json").json["state"] == "COMPLETED"


def test_a_rollback_brings_a_retired_generation_up_to_date_and_a_drop_removes_one(cli: Cli, inside: Inside) -> None:
    made = inside(cli, "rebuild", "--wait", "--resume", "--json").json
    place(cli, "after-the-rebuild")
    inside(cli, "generations", "rollback", made["generation"], "--wait").refused("only a RETIRED one")
    back = inside(cli, "generations", "rollback", made["base_generation"], "--wait", "--resume")
    assert back.exit_code == 0
    assert f"generation   {made['base_generation']}, instead of {made['generation']}" in back.lines
    status = inside(cli, "status", "--json").json
    assert status["generation"]["active"] == made["base_generation"]
    assert status["generation"]["totals"]["JPY"]["orders"] == status["orders"]
    dropped = inside(cli, "generations", "drop", made["generation"], "--json").json
    # What came after it while it was the active one is in it too.
    assert dropped == {"generation": made["generation"], "removed": status["orders"], "changed": True}
    assert made["generation"] not in inside(cli, "generations", "list").stdout
    again = inside(cli, "generations", "drop", made["generation"])
    assert (again.exit_code, again.lines) == (0, [f"{made['generation']} is dropped already"])
    inside(cli, "generations", "rollback", made["generation"], "--wait").refused(
        f"generation {made['generation']} was dropped"
    )


def test_an_operators_pause_refuses_new_orders_and_answers_known_ones(cli: Cli, inside: Inside) -> None:
    order = ("orders", "place", "--id", "known", "--sku", "tea", "--amount", "7")
    inside(cli, *order)
    assert inside(cli, "intake", "pause").lines == ["intake is paused"]
    assert inside(cli, "intake", "pause").lines == ["intake is paused already, by operator"]
    assert inside(cli, *order).lines == ["0 orders placed, 1 known before"]
    inside(cli, "orders", "place", "--id", "unknown", "--sku", "tea", "--amount", "7").refused("order intake paused")
    assert inside(cli, "status", "--json").json["intake"] == {"state": "PAUSED", "paused_by": "operator"}
    assert "intake      PAUSED by operator" in inside(cli, "status").lines
    resumed = inside(cli, "intake", "resume", "--json").json
    assert resumed == {"intake": "OPEN", "paused_by": None, "changed": True}


@pytest.mark.parametrize("bound", ["0", "-1", "nan", "soon", "604801"])
def test_a_bound_that_is_none_is_wrong_usage(inside: Inside, nothing: Cli, bound: str) -> None:
    assert inside(nothing, "rebuild", "--drain-bound", bound).exit_code == 2

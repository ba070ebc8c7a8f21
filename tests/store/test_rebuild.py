"""A rebuild from the pause to the switch: what it counts on, what it leaves alone, what it comes to."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import IntakePaused, Refused
from store.control import OPERATOR, pause_intake, resume_intake
from store.deliveries import next_batch, record_failure
from store.effects import apply_sales
from store.engine import Database
from store.orders import place_order
from store.rebuild import (
    ROLLBACK,
    begin_rebuild,
    fix_history,
    forget_expected,
    undrained,
)
from tests.store.rebuilding import (
    ACTIVATED,
    BEGUN,
    CERTIFIED,
    EXPECTED,
    FIXED,
    REPLAYED,
    STEPS,
    applied,
    begin,
    everything,
    execute,
    fail,
    fill,
    generation,
    history,
    intake,
    reach,
    rebuild,
    rebuilt,
    reconcile,
    snapshot,
    state,
    take_sales,
)
from tests.store.scenes import append, order, place, publish, rows, scalar, spread, together


def test_a_rebuild_makes_a_generation_out_of_the_whole_history_and_switches_to_it(database: Database) -> None:
    history(database, [1, 2, order(3, currency="EUR"), 4])
    before = everything(database)
    old = generation(database, "initial")
    rebuild_id = begin(database)
    assert intake(database) == ("PAUSED", "rebuild-1", "initial")
    for step in STEPS[1:-1]:
        reach(database, rebuild_id, step, chunk=2)
        assert intake(database)[2] == "initial"
        assert generation(database, "initial") == old
    reach(database, rebuild_id, ACTIVATED)
    new, retired = generation(database, "generation-1"), generation(database, "initial")
    assert new is not None
    assert old is not None
    assert retired is not None
    assert (new.state, new.totals) == ("ACTIVE", {"EUR": (1, 300), "JPY": (3, 700)})
    assert (retired.state, retired.totals) == ("RETIRED", old.totals)
    assert applied(database, "initial") == applied(database, "generation-1")
    done = rebuild(database, rebuild_id)
    assert (done.state, done.expected, done.replayed, done.ended_at) == ("COMPLETED", 4, 4, 12)
    assert intake(database) == ("PAUSED", "rebuild-1", "generation-1")
    assert everything(database) == before


def test_intake_opens_at_the_switch_if_that_was_asked_for(database: Database) -> None:
    history(database, [1])
    assert rebuilt(database, resume=True) == "generation-1"
    assert intake(database) == ("OPEN", None, "generation-1")
    place(database, 2)


def test_an_empty_history_rebuilds_to_an_empty_generation(database: Database) -> None:
    assert rebuilt(database) == "generation-1"
    new = generation(database, "generation-1")
    assert new is not None
    assert (new.state, new.totals) == ("ACTIVE", {})


def test_a_second_rebuild_builds_on_the_first(database: Database) -> None:
    history(database, [1, 2])
    rebuilt(database)
    with database.write() as connection:
        assert resume_intake(connection)
    history(database, [3])
    assert rebuilt(database, "run-2") == "generation-2"
    assert [state(database, name) for name in ("initial", "generation-1", "generation-2")] == [
        "RETIRED",
        "RETIRED",
        "ACTIVE",
    ]
    assert len(applied(database, "generation-2")) == 3


def test_sales_that_were_never_taken_live_are_in_the_new_generation_and_count_once(database: Database) -> None:
    history(database, range(1, 9), taken=False)
    with database.write() as connection:
        first, second, third, fourth, *_ = next_batch(connection, "sales", 100)
        apply_sales(connection, [fourth])
        record_failure(
            connection, "sales", first.position, attempts=1, error="e", next_attempt_at=99, now=1
        )  # retrying
        record_failure(connection, "sales", second.position, attempts=5, error="e", next_attempt_at=None, now=1)  # dead
    execute(database, f"UPDATE deliveries SET status = 'waived' WHERE position = {third.position}")
    execute(database, f"UPDATE deliveries SET status = 'done' WHERE position = {fourth.position}")
    rebuilt(database)
    new = generation(database, "generation-1")
    assert new is not None
    assert new.totals == {"JPY": (8, 3600)}
    # The others are taken later, the redriven and the retried one among them.
    execute(database, "UPDATE deliveries SET status = 'pending' WHERE status IN ('retrying', 'dead')")
    assert take_sales(database, 3) == 6
    assert generation(database, "generation-1") == new
    assert scalar(database, "SELECT count(*) FROM deliveries WHERE status = 'done'") == 7
    assert reconcile_again(database) == []


def reconcile_again(database: Database) -> list[str]:
    """What a further rebuild finds between the orders and its own generation, before its switch."""
    rebuild_id = begin(database, "run-again")
    reach(database, rebuild_id, REPLAYED)
    problems = reconcile(database, rebuild_id).problems()
    fail(database, rebuild_id)
    return problems


def test_the_same_run_begins_one_rebuild_however_often_it_begins(database: Database) -> None:
    first = begin(database)
    before = snapshot(database)
    assert begin(database) == first == "rebuild-1"
    assert snapshot(database) == before
    assert together(*[lambda: begin(database)] * 4) == [first] * 4
    assert snapshot(database) == before


def test_two_runs_that_begin_at_once_come_to_one_rebuild(database: Database) -> None:
    results = together(*[lambda number=number: begin(database, f"run-{number}") for number in range(4)])
    refused = [result for result in results if isinstance(result, Exception)]
    assert [str(error) for error in refused] == ["rebuild-1 runs already; wait for it, or cancel it"] * 3
    assert scalar(database, "SELECT count(*) FROM rebuilds") == 1


def test_a_second_rebuild_is_refused_until_the_first_is_over(database: Database) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    for step in STEPS[1:-1]:
        reach(database, rebuild_id, step)
        before = snapshot(database)
        for kind in ("rebuild", ROLLBACK):
            with pytest.raises(Refused, match="rebuild-1 runs already"):
                begin(database, "run-2", kind=kind)
        assert snapshot(database) == before
    fail(database, rebuild_id)
    assert begin(database, "run-2") == "rebuild-2"
    # The first run again finds its own, which is over.
    assert begin(database, "run-1") == "rebuild-1"


def test_intake_takes_nothing_and_cannot_be_resumed_while_a_rebuild_runs(database: Database) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    for step in (BEGUN, FIXED, REPLAYED, CERTIFIED):
        reach(database, rebuild_id, step)
        before = snapshot(database)
        with pytest.raises(IntakePaused):
            place(database, 2)
        place(database, 1)  # the same order again is answered as before
        with database.write() as connection, pytest.raises(Refused, match=r"rebuild-1 runs and needs intake paused"):
            resume_intake(connection)
        assert snapshot(database) == before
    reach(database, rebuild_id, ACTIVATED)
    with database.write() as connection:
        assert resume_intake(connection)
    place(database, 2)


def test_a_pause_by_hand_meanwhile_takes_nothing_from_the_rebuild(database: Database) -> None:
    history(database, [1])
    with database.write() as connection:
        pause_intake(connection, OPERATOR)
    rebuild_id = begin(database)
    with database.write() as connection:
        pause_intake(connection, OPERATOR)
    reach(database, rebuild_id, ACTIVATED)
    assert intake(database) == ("PAUSED", "rebuild-1", "generation-1")
    with database.write() as connection:
        pause_intake(connection, OPERATOR)
    assert intake(database) == ("PAUSED", OPERATOR, "generation-1")


def test_an_intake_in_flight_commits_before_the_pause_does(database: Database) -> None:
    placed, release, paused = threading.Event(), threading.Event(), threading.Event()

    def slow_intake() -> None:
        with database.write() as connection:
            place_order(connection, order(1), 1)
            placed.set()
            assert release.wait(60)
            assert not paused.is_set()

    def pause() -> list[tuple[Any, ...]]:
        assert placed.wait(60)
        begin(database)
        paused.set()
        return rows(database, "SELECT id FROM orders")

    def releaser() -> None:
        assert placed.wait(60)
        # The pause waits: it does not commit while the intake is open.
        assert not paused.wait(0.3)
        release.set()

    assert together(slow_intake, pause, releaser) == [None, [("order-1",)], None]
    with pytest.raises(IntakePaused):
        place(database, 2)


def test_whatever_intakes_race_with_a_rebuild_each_order_is_in_its_history_or_refused(database: Database) -> None:
    history(database, [1])
    go = threading.Event()

    def take_orders(first: int) -> int:
        for accepted in range(500):
            try:
                place(database, first + accepted)
            except IntakePaused:
                return accepted
            if accepted == 2:
                go.set()
        raise AssertionError("the pause never came")

    def saga() -> str:
        assert go.wait(60)
        rebuild_id = begin(database)
        count = scalar(database, "SELECT count(*) FROM orders")
        spread(database, *publish(database))
        reach(database, rebuild_id, ACTIVATED)
        assert rebuild(database, rebuild_id).expected == count
        return rebuild_id

    *accepted, rebuild_id = together(*[lambda at=at: take_orders(at) for at in (1000, 2000, 3000)], saga)
    assert rebuild_id == "rebuild-1"
    assert scalar(database, "SELECT count(*) FROM orders") == 1 + sum(accepted)
    assert len(applied(database, "generation-1")) == 1 + sum(accepted)


def test_a_resume_that_meets_a_rebuild_at_its_beginning_waits_and_is_refused(postgres: Database) -> None:
    with postgres.write() as connection:
        pause_intake(connection, OPERATOR)
    begun, release, over = threading.Event(), threading.Event(), threading.Event()

    def slow_begin() -> None:
        with postgres.write() as connection:
            begin_rebuild(connection, "run-1", kind="rebuild", target=None, resume=False, now=10)
            begun.set()
            assert release.wait(60)

    def resume() -> None:
        assert begun.wait(60)
        try:
            with postgres.write() as connection:
                resume_intake(connection)
        finally:
            over.set()

    def releaser() -> None:
        assert begun.wait(60)
        assert not over.wait(0.2)
        release.set()

    _, refused, _ = together(slow_begin, resume, releaser)
    assert isinstance(refused, Refused)
    assert intake(postgres)[:2] == ("PAUSED", "rebuild-1")


def test_the_history_is_fixed_only_once_every_order_has_its_deliveries(database: Database) -> None:
    history(database, [1])
    place(database, 2)
    rebuild_id = begin(database)
    for _ in range(2):
        with database.write() as connection:
            assert not fix_history(connection, rebuild_id, 11)
            assert undrained(connection, 20) == ["order-2:placed"]
    ids = publish(database)
    with database.write() as connection:
        assert not fix_history(connection, rebuild_id, 11)
        assert undrained(connection, 20) == ["order-2:placed"]
    assert rebuild(database, rebuild_id).until_position is None
    assert state(database, "generation-1") is None
    spread(database, *ids)
    with database.write() as connection:
        assert fix_history(connection, rebuild_id, 11)
    assert rebuild(database, rebuild_id).until_position == 2


def test_events_of_other_types_on_their_way_do_not_keep_a_rebuild_waiting(database: Database) -> None:
    history(database, [1])
    append(database, "job/job-1", 1)
    rebuild_id = begin(database)
    reach(database, rebuild_id, ACTIVATED)


def test_an_order_without_its_event_and_an_event_without_its_order_are_differences(database: Database) -> None:
    history(database, [1, 2, 3])
    execute(database, "DELETE FROM orders WHERE id = 'order-1'")
    execute(database, "UPDATE outbox SET event_type = 'other' WHERE event_id = 'order-2:placed'")
    execute(database, "UPDATE orders SET amount = 333 WHERE id = 'order-3'")
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED)
    missing, unexpected, different, _ = reconcile(database, rebuild_id).problems()
    assert missing == "missing: order-2:placed"
    assert unexpected == "unexpected: order-1:placed"
    assert different == "different: order-3:placed (expected 333 JPY, found 300 JPY)"


def test_the_expected_set_is_removed_in_chunks_and_only_of_that_rebuild(database: Database) -> None:
    history(database, range(1, 6))
    first = begin(database)
    reach(database, first, EXPECTED)
    fail(database, first)
    second = begin(database, "run-2")
    reach(database, second, EXPECTED)
    for left in (2, 2, 1, 0, 0):
        with database.write() as connection:
            assert forget_expected(connection, first, 2) == left
    assert rows(database, "SELECT DISTINCT rebuild_id FROM rebuild_expected") == [(second,)]


def test_a_hundred_thousand_events_are_rebuilt_in_short_transactions(sqlite: Database) -> None:
    total = 100_000
    fill(sqlite, total, fanned_out=True)
    written: list[int] = []

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT"):
            written[-1] += cursor.rowcount

    sa.event.listen(sqlite.engine, "begin", lambda _: written.append(0))
    sa.event.listen(sqlite.engine, "after_cursor_execute", count)
    rebuild_id = begin(sqlite)
    reach(sqlite, rebuild_id, REPLAYED, chunk=5_000)
    assert max(written) <= 5_000 + 2  # and a total a currency
    assert sum(written) >= 2 * total
    assert reconcile(sqlite, rebuild_id, limit=20_000).problems() == []
    reach(sqlite, rebuild_id, ACTIVATED, chunk=5_000)
    new = generation(sqlite, "generation-1")
    assert new is not None
    assert sum(amount for _, amount in new.totals.values()) == total * (total + 1) // 2
    assert {code: count for code, (count, _) in new.totals.items()} == {"EUR": total // 10, "JPY": total - total // 10}

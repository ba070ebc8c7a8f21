"""Generations: back to a retired one, and away with those that nobody needs."""

import threading
from typing import Any

import pytest

from contracts.errors import NotFound, Refused
from store.control import resume_intake
from store.engine import Database
from store.generations import begin_drop, drop_chunk, list_generations, move, rollback_target, state_of
from store.rebuild import ROLLBACK, fix_history
from tests.store.rebuilding import (
    ACTIVATED,
    BEGUN,
    CERTIFIED,
    FIXED,
    REPLAYED,
    SEALED,
    begin,
    execute,
    fail,
    generation,
    history,
    reach,
    rebuild,
    rebuilt,
    reconcile,
    snapshot,
    state,
    take_sales,
)
from tests.store.scenes import rows, scalar, together


def _resume(database: Database) -> None:
    with database.write() as connection:
        resume_intake(connection)


def _two(database: Database) -> None:
    """`initial` (retired, 3 orders) and `generation-1` (active, 5 orders)."""
    history(database, [1, 2, 3])
    rebuilt(database, resume=True)
    history(database, [4, 5])


def _active(database: Database) -> str:
    return str(scalar(database, "SELECT active_generation FROM control"))


def _drop(database: Database, name: str, limit: int = 2) -> list[int]:
    with database.write() as connection:
        begin_drop(connection, name)
    removed = []
    while not removed or removed[-1]:
        with database.write() as connection:
            removed.append(drop_chunk(connection, name, limit))
    return removed


def test_a_rollback_brings_the_retired_generation_up_to_date_and_switches_to_it(database: Database) -> None:
    _two(database)
    retired = generation(database, "initial")
    assert retired is not None
    assert retired.totals == {"JPY": (3, 600)}
    rebuild_id = begin(database, "run-2", kind=ROLLBACK)
    assert rebuild_id == "rollback-2"
    reach(database, rebuild_id, ACTIVATED, chunk=2)
    back, replaced = generation(database, "initial"), generation(database, "generation-1")
    assert back is not None
    assert replaced is not None
    assert (back.state, back.totals) == ("ACTIVE", {"JPY": (5, 1500)})
    assert back.certificate is not None
    assert (replaced.state, replaced.totals) == ("RETIRED", back.totals)
    assert rebuild(database, rebuild_id).replayed == 2  # only what it lacked
    _resume(database)
    history(database, [6])
    assert generation(database, "initial").totals == {"JPY": (6, 2100)}  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [BEGUN, FIXED, REPLAYED, SEALED, CERTIFIED])
def test_a_rollback_that_ends_early_leaves_the_generation_retired_and_may_be_tried_again(
    database: Database, step: str
) -> None:
    _two(database)
    active = generation(database, "generation-1")
    rebuild_id = begin(database, "run-2", kind=ROLLBACK)
    reach(database, rebuild_id, step)
    fail(database, rebuild_id)
    assert (state(database, "initial"), _active(database)) == ("RETIRED", "generation-1")
    assert generation(database, "generation-1") == active
    # What it holds still adds up.
    assert generation(database, "initial").totals == {  # type: ignore[union-attr]
        "JPY": rows(
            database, "SELECT count(*), CAST(sum(amount) AS BIGINT) FROM sales_applied WHERE generation = 'initial'"
        )[0]
    }
    again = begin(database, "run-3", kind=ROLLBACK)
    reach(database, again, ACTIVATED)
    assert generation(database, "initial").totals == {"JPY": (5, 1500)}  # type: ignore[union-attr]


def test_a_rollback_to_a_generation_that_differs_is_caught_and_it_stays_retired(database: Database) -> None:
    _two(database)
    execute(database, "UPDATE sales_applied SET amount = 201 WHERE generation = 'initial' AND position = 2")
    rebuild_id = begin(database, "run-2", kind=ROLLBACK)
    reach(database, rebuild_id, REPLAYED)
    assert reconcile(database, rebuild_id).problems() == [
        "different: order-2:placed (expected 200 JPY, found 201 JPY)",
        "totals: JPY expected 5 orders, 1500; rows hold 5, 1501; totals say 5, 1500",
    ]
    fail(database, rebuild_id)
    assert (state(database, "initial"), _active(database)) == ("RETIRED", "generation-1")


def test_a_rollback_goes_to_the_generation_that_was_active_last_or_to_the_one_named(database: Database) -> None:
    history(database, [1])
    rebuilt(database, "run-1")
    rebuilt(database, "run-2")
    for number, (target, expected) in enumerate(
        [
            (None, "generation-1"),
            ("initial", "initial"),
            (None, "generation-1"),
            (None, "initial"),
            ("generation-2",) * 2,
        ]
    ):
        assert rebuilt(database, f"back-{number}", kind=ROLLBACK, target=target) == expected
        assert _active(database) == expected


def test_a_rollback_to_what_is_not_retired_is_refused_and_changes_nothing(database: Database) -> None:
    before = snapshot(database)
    with pytest.raises(Refused, match="no retired generation to roll back to"):
        begin(database, kind=ROLLBACK)
    with pytest.raises(NotFound, match=r"there is no generation nowhere; `generations list` names them"):
        begin(database, kind=ROLLBACK, target="nowhere")
    with pytest.raises(Refused, match="generation initial is ACTIVE; only a RETIRED one"):
        begin(database, kind=ROLLBACK, target="initial")
    assert snapshot(database) == before
    fail(database, begin(database))  # before it had a generation
    rebuild_id = begin(database, "run-2")
    reach(database, rebuild_id, FIXED)
    fail(database, rebuild_id)
    with pytest.raises(Refused, match="generation generation-2 is FAILED; only a RETIRED one"):
        begin(database, "run-3", kind=ROLLBACK, target="generation-2")


def test_retired_and_failed_generations_are_dropped_with_their_rows(database: Database) -> None:
    _two(database)
    rebuild_id = begin(database, "run-2")
    reach(database, rebuild_id, REPLAYED)
    fail(database, rebuild_id)
    active = generation(database, "generation-1")
    assert _drop(database, "initial") == [2, 1, 0]
    assert _drop(database, "generation-2") == [2, 2, 1, 0]
    with database.read() as connection:
        assert list_generations(connection) == [active]
    assert rows(database, "SELECT DISTINCT generation FROM sales_applied") == [("generation-1",)]
    assert rows(database, "SELECT DISTINCT generation FROM sales_totals") == [("generation-1",)]
    with database.write() as connection:
        assert not begin_drop(connection, "initial")
        with pytest.raises(NotFound, match="generation initial was dropped"):
            rollback_target(connection, "initial")
        with pytest.raises(NotFound, match="there is no generation nowhere"):
            begin_drop(connection, "nowhere")
    # Its name is not given again.
    assert rebuilt(database, "run-3") == "generation-3"


def test_a_drop_that_was_cut_off_goes_on_and_nobody_rolls_back_to_the_rest(database: Database) -> None:
    _two(database)
    with database.write() as connection:
        begin_drop(connection, "initial")
        assert drop_chunk(connection, "initial", 1) == 1
    with pytest.raises(Refused):
        begin(database, "run-2", kind=ROLLBACK)
    with pytest.raises(Refused, match="generation initial is FAILED"):
        begin(database, "run-2", kind=ROLLBACK, target="initial")
    assert sum(_drop(database, "initial")) == 2
    assert state(database, "initial") is None


def test_two_that_drop_at_once_remove_each_row_once(database: Database) -> None:
    history(database, range(1, 21))
    rebuilt(database)
    results = together(*[lambda: _drop(database, "initial", 3)] * 3)
    # One that comes last finds no generation any more.
    assert sum(sum(each) for each in results if isinstance(each, list)) == 20
    assert all(isinstance(each, list | NotFound) for each in results)
    assert state(database, "initial") is None


@pytest.mark.parametrize("which", ["ACTIVE", "BUILDING", "SEALED"])
def test_a_generation_in_use_is_not_dropped(database: Database, which: str) -> None:
    history(database, [1, 2])
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED if which == "BUILDING" else SEALED)
    name = "initial" if which == "ACTIVE" else "generation-1"
    before = snapshot(database)
    with pytest.raises(Refused, match=f"generation {name} is {which}; only RETIRED and FAILED ones can be dropped"):
        _drop(database, name)
    with pytest.raises(Refused, match=f"generation {name} is {which}, and its rows are in use"):
        _chunk(database, name)
    assert snapshot(database) == before


def _chunk(database: Database, name: str) -> int:
    with database.write() as connection:
        return drop_chunk(connection, name, 10)


def test_a_drop_that_meets_a_rollback_of_the_same_generation_is_refused(postgres: Database) -> None:
    _two(postgres)
    rebuild_id = begin(postgres, "run-2", kind=ROLLBACK)
    fixed, release = threading.Event(), threading.Event()

    def slow_rollback() -> None:
        with postgres.write() as connection:
            assert fix_history(connection, rebuild_id, 11)
            fixed.set()
            release.wait(0.3)

    def drop() -> None:
        assert fixed.wait(60)
        _drop(postgres, "initial")

    _, refused = together(slow_rollback, drop)
    release.set()
    assert isinstance(refused, Refused)
    assert str(refused).startswith("generation initial is BUILDING")
    assert generation(postgres, "initial").totals == {"JPY": (3, 600)}  # type: ignore[union-attr]
    reach(postgres, rebuild_id, ACTIVATED)


def test_a_state_changes_only_from_the_one_that_was_meant(database: Database) -> None:
    with database.write() as connection:
        assert not move(connection, "initial", "SEALED", "RETIRED")
        assert not move(connection, "nowhere", "ACTIVE", "RETIRED")
        assert state_of(connection, "initial") == "ACTIVE"
        with pytest.raises(NotFound):
            state_of(connection, "nowhere")
        with pytest.raises(NotFound):
            rollback_target(connection, "nowhere")


def test_generations_are_listed_oldest_first_with_their_totals(database: Database) -> None:
    history(database, [1, 2])
    rebuilt(database, now=10)
    with database.read() as connection:
        listed: list[Any] = [(each.generation, each.state, each.totals) for each in list_generations(connection)]
    assert listed == [
        ("initial", "RETIRED", {"JPY": (2, 300)}),
        ("generation-1", "ACTIVE", {"JPY": (2, 300)}),
    ]


def test_sales_go_on_into_the_generation_that_is_active(database: Database) -> None:
    _two(database)
    history(database, [6], taken=False)
    rebuilt(database, "run-2", kind=ROLLBACK)
    assert take_sales(database) == 1
    assert generation(database, "initial").totals == {"JPY": (6, 2100)}  # type: ignore[union-attr]
    assert generation(database, "generation-1").totals == {"JPY": (5, 1500)}  # type: ignore[union-attr]

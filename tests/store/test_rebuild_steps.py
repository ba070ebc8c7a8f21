"""Each step of a rebuild may be repeated, doubled, killed around its commit, or find that all is over."""

import signal
import threading

import pytest
import sqlalchemy as sa

from contracts.errors import NotFound, Refused
from store.engine import Database
from store.rebuild import (
    fail_rebuild,
    get_rebuild,
    last_rebuild,
    replay_chunk,
    running_rebuild,
    seal,
    set_phase,
)
from tests.store.processes import Script
from tests.store.rebuilding import (
    ACTIVATED,
    BEGUN,
    CERTIFIED,
    EXPECTED,
    FIXED,
    ONE,
    REPLAYED,
    SEALED,
    STEPS,
    begin,
    everything,
    execute,
    fail,
    generation,
    history,
    intake,
    reach,
    rebuild,
    rebuilt,
    reconcile,
    run,
    snapshot,
    state,
)
from tests.store.scenes import order, scalar, together


def _before(step: str) -> str:
    return STEPS[STEPS.index(step) - 1]


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_step_that_is_repeated_changes_nothing(database: Database, step: str) -> None:
    history(database, [1, 2, order(3, currency="EUR")])
    rebuild_id = begin(database)
    reach(database, rebuild_id, _before(step))
    first = run(database, ONE[step], rebuild_id)
    before = snapshot(database)
    assert run(database, ONE[step], rebuild_id) == first
    assert snapshot(database) == before
    # And from the start, as after a worker's death.
    reach(database, rebuild_id, step, chunk=2)
    if step != CERTIFIED:  # whose text is another one
        assert snapshot(database) == before


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_step_that_two_do_at_once_is_done_once(database: Database, step: str) -> None:
    history(database, range(1, 40))
    rebuild_id = begin(database)
    reach(database, rebuild_id, _before(step))
    results = together(*[lambda: run(database, ONE[step], rebuild_id)] * 4)
    assert results == [results[0]] * 4
    assert not isinstance(results[0], Exception)
    reach(database, rebuild_id, ACTIVATED)
    done = rebuild(database, rebuild_id)
    assert (done.expected, done.replayed) == (39, 39)
    new = generation(database, "generation-1")
    assert new is not None
    assert new.totals == {"JPY": (39, 78_000)}


# Forks a victim for each step when it is told to: everything is imported once.
_VICTIMS = """
import os, signal, sys
from store.engine import Database
from tests.store.rebuilding import ONE, begin, run
url, committed, *steps = sys.argv[1:]
def live(step):
    def dies(connection, rebuild_id):
        ONE[step](connection, rebuild_id)
        os.kill(os.getpid(), signal.SIGKILL)
    database = Database(url)
    if step == "begun":
        begin(database)
    else:
        run(database, ONE[step] if committed == "True" else dies, "rebuild-1")
    os.kill(os.getpid(), signal.SIGKILL)
for step in steps:
    sys.stdin.readline()
    pid = os.fork()
    if pid == 0:
        try:
            live(step)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _victims(database: Database, committed: bool, *steps: str) -> Script:
    return Script(_VICTIMS, database.url.render_as_string(hide_password=False), str(committed), *steps)


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
def test_a_worker_killed_around_the_commit_of_any_step_is_carried_on(database: Database, committed: bool) -> None:
    history(database, range(1, 8))
    rebuild_id = begin(database)
    with _victims(database, committed, *STEPS[1:]) as victims:
        for step in STEPS[1:]:
            before = snapshot(database)
            victims.say()
            assert victims.line() == str(int(-signal.SIGKILL))
            if not committed:
                assert snapshot(database) == before
            reach(database, rebuild_id, step)
    new = generation(database, "generation-1")
    assert new is not None
    assert (new.state, new.totals) == ("ACTIVE", {"JPY": (7, 2800)})
    assert rebuild(database, rebuild_id).replayed == 7


def test_a_begin_killed_after_its_commit_is_found_by_the_next_attempt(database: Database) -> None:
    with _victims(database, True, BEGUN) as victims:
        victims.say()
        assert victims.line() == str(int(-signal.SIGKILL))
    assert begin(database) == "rebuild-1"
    assert scalar(database, "SELECT count(*) FROM rebuilds") == 1


def test_chunks_of_one_row_come_to_the_same_as_one_chunk(database: Database) -> None:
    history(database, [*range(1, 6), order(6, currency="EUR")])
    rebuild_id = begin(database)
    for step in (EXPECTED, REPLAYED):
        reach(database, rebuild_id, step, chunk=1)
        reach(database, rebuild_id, step, chunk=4)
    assert reconcile(database, rebuild_id).problems() == []
    done = rebuild(database, rebuild_id)
    assert (done.expected, done.replayed) == (6, 6)


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_rebuild_that_ends_early_leaves_the_old_generation_and_the_pause_and_can_begin_again(
    database: Database, step: str
) -> None:
    history(database, [1, 2, 3])
    active, other = generation(database, "initial"), everything(database)
    rebuild_id = begin(database)
    reach(database, rebuild_id, step)
    ended = fail(database, rebuild_id, "it was cancelled")
    assert (ended.state, ended.error, ended.ended_at) == ("FAILED", "it was cancelled", 13)
    assert state(database, "generation-1") == (None if step == BEGUN else "FAILED")
    assert generation(database, "initial") == active
    assert intake(database) == ("PAUSED", rebuild_id, "initial")
    before = snapshot(database)
    assert fail(database, rebuild_id, "again") == ended
    # A late activity writes nothing.
    for late in (*ONE.values(), lambda connection, each: set_phase(connection, each, "late")):
        with pytest.raises(Refused, match="rebuild-1 is over: FAILED, it was cancelled"):
            run(database, late, rebuild_id)
    assert snapshot(database) == before
    assert everything(database) == other
    assert rebuilt(database, "run-2") == "generation-2"


def test_an_end_after_the_switch_reports_that_it_was_made(database: Database) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    reach(database, rebuild_id, ACTIVATED)
    before = snapshot(database)
    ended = fail(database, rebuild_id)
    assert (ended.state, ended.error, ended.ended_at) == ("COMPLETED", None, 12)
    assert snapshot(database) == before


def test_an_end_and_a_switch_at_once_come_to_one_of_them(database: Database) -> None:
    history(database, [1, 2])
    seen = set()
    for number in range(8):
        active = intake(database)[2]
        rebuild_id = begin(database, f"run-{number}")
        reach(database, rebuild_id, CERTIFIED)
        new = rebuild(database, rebuild_id).generation

        def end(rebuild_id: str = rebuild_id) -> str:
            return fail(database, rebuild_id).state

        def switch(rebuild_id: str = rebuild_id) -> str:
            return str(run(database, ONE[ACTIVATED], rebuild_id).state)

        ended, switched = together(end, switch)
        if ended == "COMPLETED":
            assert switched == "COMPLETED"
            assert (intake(database)[2], state(database, active)) == (new, "RETIRED")
        else:
            assert isinstance(switched, Refused)
            assert (intake(database)[2], state(database, new)) == (active, "FAILED")
        seen.add(ended)
    assert scalar(database, "SELECT count(*) FROM generations WHERE state = 'ACTIVE'") == 1


@pytest.mark.parametrize("step", [FIXED, EXPECTED, REPLAYED, SEALED])
def test_a_step_that_overlaps_the_end_leaves_nothing_behind(database: Database, step: str) -> None:
    """Its transaction is open, has read RUNNING, and commits only after somebody ended the rebuild or tried to."""
    history(database, range(1, 30))
    rebuild_id = begin(database)
    reach(database, rebuild_id, _before(step))
    inside, release = threading.Event(), threading.Event()

    def slow(connection: sa.Connection, rebuild_id: str) -> None:
        set_phase(connection, rebuild_id, "slow") if step == FIXED else get_rebuild(connection, rebuild_id)
        inside.set()
        release.wait(0.3)
        ONE[step](connection, rebuild_id)

    def end() -> str:
        assert inside.wait(60)
        ended = fail(database, rebuild_id).state
        release.set()
        return ended

    _, ended = together(lambda: run(database, slow, rebuild_id), end)
    assert ended == "FAILED"
    assert state(database, "generation-1") in (None, "FAILED")
    assert rebuilt(database, "run-2") == "generation-2"


@pytest.mark.parametrize("others", ["RETIRED", "FAILED"])
def test_an_end_touches_only_what_is_building_or_sealed(database: Database, others: str) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED)
    execute(database, f"UPDATE generations SET state = '{others}' WHERE generation = 'generation-1'")
    fail(database, rebuild_id)
    assert state(database, "generation-1") == others
    assert state(database, "initial") == "ACTIVE"


def test_steps_of_an_unknown_rebuild_are_refused(database: Database) -> None:
    for step in (*ONE.values(), get_rebuild, lambda connection, each: fail_rebuild(connection, each, "e", 1)):
        with pytest.raises(NotFound, match="there is no rebuild rebuild-9"):
            run(database, step, "rebuild-9")
    with database.read() as connection:
        assert (last_rebuild(connection), running_rebuild(connection)) == (None, None)


def test_replay_waits_for_a_fixed_history(database: Database) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    with pytest.raises(Refused, match="has not fixed its history yet"):
        run(database, ONE[REPLAYED], rebuild_id)


def test_a_sealed_generation_takes_no_late_write(database: Database) -> None:
    history(database, [1, 2, 3])
    rebuild_id = begin(database)
    reach(database, rebuild_id, EXPECTED)
    run(database, lambda connection, each: replay_chunk(connection, each, 0, 1), rebuild_id)
    run(database, seal, rebuild_id)
    before = snapshot(database)
    with pytest.raises(Refused, match="generation generation-1 takes no writes any more"):
        run(database, ONE[REPLAYED], rebuild_id)
    assert snapshot(database) == before


def test_seal_waits_for_a_replay_in_flight(postgres: Database) -> None:
    history(postgres, [1, 2, 3])
    rebuild_id = begin(postgres)
    reach(postgres, rebuild_id, EXPECTED)
    replayed, release, sealed = threading.Event(), threading.Event(), threading.Event()

    def slow(connection: sa.Connection, rebuild_id: str) -> None:
        replay_chunk(connection, rebuild_id, 0, 1000)
        replayed.set()
        assert release.wait(60)

    def closer() -> None:
        assert replayed.wait(60)
        run(postgres, seal, rebuild_id)
        sealed.set()

    def releaser() -> None:
        assert replayed.wait(60)
        assert not sealed.wait(0.3)
        release.set()

    together(lambda: run(postgres, slow, rebuild_id), closer, releaser)
    assert sealed.is_set()
    assert reconcile(postgres, rebuild_id).problems() == []


@pytest.mark.parametrize("step", [BEGUN, FIXED, REPLAYED])
def test_a_certificate_is_stored_only_for_a_sealed_generation(database: Database, step: str) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    reach(database, rebuild_id, step)
    before = snapshot(database)
    with pytest.raises(Refused, match="not sealed"):
        run(database, ONE[CERTIFIED], rebuild_id)
    assert snapshot(database) == before


def test_the_database_accepts_no_active_generation_without_a_certificate(database: Database) -> None:
    history(database, [1])
    rebuild_id = begin(database)
    reach(database, rebuild_id, SEALED)
    for statement in (
        "UPDATE generations SET state = 'ACTIVE' WHERE generation = 'generation-1'",
        "INSERT INTO generations (generation, state, created_at) VALUES ('other', 'ACTIVE', 1)",
        "UPDATE generations SET state = 'ACTIVE', certificate = '{}' WHERE generation = 'generation-1'",  # a second one
    ):
        with pytest.raises(sa.exc.IntegrityError):
            execute(database, statement)

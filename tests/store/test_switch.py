"""The switch to a new generation: all of its conditions and changes in one transaction, or nothing."""

import threading
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from contracts.errors import Refused
from receivers.builtin import Sales
from store.control import read_control
from store.deliveries import mark_done, next_batch
from store.effects import apply_sales
from store.engine import Database
from store.rebuild import (
    activate,
)
from store.receivers import lock_receiver
from tests.store.rebuilding import (
    ACTIVATED,
    CERTIFIED,
    ONE,
    applied,
    begin,
    execute,
    fail,
    generation,
    history,
    reach,
    rebuilt,
    run,
    snapshot,
    state,
)
from tests.store.scenes import scalar, together


def _no_certificate(database: Database) -> None:
    execute(database, "UPDATE rebuilds SET certificate = NULL")


def _intake_resumed(database: Database) -> None:
    execute(database, "UPDATE control SET intake = 'OPEN', paused_by = NULL, epoch = epoch + 1")


def _paused_by_another(database: Database) -> None:
    execute(database, "UPDATE control SET paused_by = 'operator'")


def _epoch_changed(database: Database) -> None:
    execute(database, "UPDATE control SET epoch = epoch + 2")


def _late_event(database: Database) -> None:
    execute(
        database,
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload) "
        "VALUES ('late:placed', 'order/late', 1, 'order-placed', '{}')",
    )


def _base_not_active(database: Database) -> None:
    execute(database, "UPDATE generations SET state = 'RETIRED' WHERE generation = 'initial'")


def _pointer_elsewhere(database: Database) -> None:
    execute(database, "UPDATE control SET active_generation = 'other'")


def _not_sealed(database: Database) -> None:
    execute(database, "UPDATE generations SET state = 'BUILDING' WHERE generation = 'generation-1'")


UNMET: dict[Callable[[Database], None], str] = {
    _no_certificate: "generation generation-1 has no certificate",
    _intake_resumed: "intake is not paused by rebuild-1 any more",
    _paused_by_another: "intake is not paused by rebuild-1 any more",
    _epoch_changed: "intake was paused or resumed since rebuild-1 began",
    _late_event: "event late:placed was recorded after the history was fixed",
    _base_not_active: "generation initial is not the active one any more",
    _pointer_elsewhere: "generation initial is not the active one any more",
    _not_sealed: "generation generation-1 is not sealed",
}


@pytest.mark.parametrize("spoil", UNMET, ids=lambda spoil: spoil.__name__.strip("_"))
def test_the_switch_refuses_each_unmet_condition_by_name_and_changes_nothing(
    database: Database, spoil: Callable[[Database], None]
) -> None:
    history(database, [1, 2])
    rebuild_id = begin(database)
    reach(database, rebuild_id, CERTIFIED)
    spoil(database)
    before = snapshot(database)
    with pytest.raises(Refused) as refusal:
        run(database, ONE[ACTIVATED], rebuild_id)
    assert str(refusal.value) == UNMET[spoil]
    assert snapshot(database) == before
    assert fail(database, rebuild_id).state == "FAILED"
    assert state(database, "generation-1") == "FAILED"


def test_readers_see_one_active_generation_that_control_names_at_every_instant(database: Database) -> None:
    history(database, range(1, 20))
    over = threading.Event()

    def reader() -> int:
        reads = 0
        while not over.is_set():
            with database.read() as connection:
                named = read_control(connection).active_generation
                [active] = connection.execute(
                    sa.text("SELECT generation FROM generations WHERE state = 'ACTIVE'")
                ).scalars()
                total = connection.execute(
                    sa.text(f"SELECT amount FROM sales_totals WHERE generation = '{named}'")
                ).scalar_one()
            assert (active, total) == (named, 19_000)
            reads += 1
        return reads

    def writer() -> None:
        try:
            for number in range(4):
                rebuilt(database, f"run-{number}")
        finally:
            over.set()

    *reads, _ = together(reader, reader, writer)
    assert all(isinstance(count, int) and count > 3 for count in reads), reads


def test_live_sales_that_race_with_the_switch_never_write_to_a_retired_generation(database: Database) -> None:
    """Sales taken before the switch are in the old generation, later ones in the new one, and none counts twice."""
    history(database, range(1, 301), taken=False)
    rebuild_id = begin(database)
    reach(database, rebuild_id, CERTIFIED)
    started = threading.Event()

    def live() -> int:
        taken = 0
        while True:
            with database.write() as connection:
                lock_receiver(connection, "sales")
                events = next_batch(connection, "sales", 5)
                apply_sales(connection, events)
                mark_done(connection, "sales", [event.position for event in events])
            if not events:
                return taken
            taken += len(events)
            if taken >= 30:
                started.set()

    def switch() -> int:
        assert started.wait(60)
        run(database, ONE[ACTIVATED], rebuild_id)
        return int(scalar(database, "SELECT count(*) FROM sales_applied WHERE generation = 'initial'"))

    first, second, at_the_switch = together(live, live, switch)
    assert first + second == 300
    retired, new = generation(database, "initial"), generation(database, "generation-1")
    assert retired is not None
    assert new is not None
    assert 0 < at_the_switch < 300
    # Nothing came to the old one after the switch was committed, and what it has adds up.
    assert len(applied(database, "initial")) == at_the_switch
    assert retired.totals["JPY"][0] == at_the_switch
    assert (new.totals, len(applied(database, "generation-1"))) == ({"JPY": (300, 4_515_000)}, 300)


def test_a_live_sale_that_waited_for_the_switch_goes_to_the_new_generation(postgres: Database) -> None:
    history(postgres, [1, 2], taken=False)
    rebuild_id = begin(postgres)
    reach(postgres, rebuild_id, CERTIFIED)
    switched, taken, release = threading.Event(), threading.Event(), threading.Event()

    def switch() -> None:
        with postgres.write() as connection:
            activate(connection, rebuild_id, 12)
            switched.set()
            assert release.wait(60)

    def live() -> None:
        assert switched.wait(60)
        with postgres.write() as connection:
            Sales().deliver_batch(connection, next_batch(connection, "sales", 10))
        taken.set()

    def releaser() -> None:
        assert switched.wait(60)
        assert not taken.wait(0.3)
        release.set()

    together(switch, live, releaser)
    assert taken.is_set()
    assert applied(postgres, "initial") == []
    assert len(applied(postgres, "generation-1")) == 2

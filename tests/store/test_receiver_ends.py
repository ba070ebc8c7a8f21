"""A receiver that is ended takes nothing more; what it has not taken is waived, on record, and the audit is clean."""

import contextlib
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.errors import Conflict, InvalidInput, NotFound, Refused
from contracts.events import ORDER_PLACED
from store.audit import audit
from store.deliveries import DEAD, DONE, PENDING, RETRYING, WAIVED, record_failure
from store.engine import Database
from store.fanout import fan_out, register_deliveries
from store.faults import list_faults, set_fault
from store.outbox import append_event, publish_again
from store.receiver_ends import ReceiverEnd, begin_end, finish_end, read_end, waive_chunk
from store.receivers import current_receivers, hold_receiver, register_receiver, subscriptions_of
from store.stalls import backlogs
from store.status import count_deliveries, receiver_status
from tests.store.scenes import place, publish, register, rows, spread
from tests.store.test_audit import deliver


def end(database: Database, receiver: str = "mail", reason: str = "sold", limit: int = 2) -> ReceiverEnd:
    """As the command does it, in small steps."""
    with database.write() as connection:
        found, _ = begin_end(connection, receiver, reason, "me", 10)
    if found.ended_at is not None:
        return found
    while True:
        with database.write() as connection:
            if waive_chunk(connection, receiver, 11, limit) < limit:
                break
    return finish(database, receiver, limit)


def finish(database: Database, receiver: str = "mail", limit: int = 2) -> ReceiverEnd:
    while True:
        with database.write() as connection:
            found = finish_end(connection, receiver, 12, limit)
        if found is not None:
            return found


def counts(database: Database, receiver: str = "mail") -> dict[str, int]:
    with database.read() as connection:
        return {state: number for state, number in count_deliveries(connection, receiver).items() if number}


def breaks(database: Database) -> list[Any]:
    with database.read() as connection:
        return audit(connection).breaks


@pytest.fixture
def shop(database: Database) -> Database:
    """Ten orders: at `mail` 1 is done, 2 retries, 3 is dead, 4 to 6 are pending, 7 to 10 are not fanned out: 7 and 8 in
    Redis, 9 and 10 not even there."""
    register(database, "billing", "mail", "sales", event_type=ORDER_PLACED)
    place(database, *range(1, 7))
    spread(database, *publish(database))
    for receiver in ("billing", "mail", "sales"):
        deliver(database, receiver, 1)
    with database.write() as connection:
        for position, due in ((2, 100), (3, None)):
            record_failure(connection, "mail", position, attempts=1, error="no", next_attempt_at=due, now=5)
        hold_receiver(connection, "mail", "down", 5)
        set_fault(connection, "mail", "outage")
    place(database, 7, 8)
    publish(database)
    place(database, 9, 10)
    assert counts(database) == {DONE: 1, RETRYING: 1, DEAD: 1, PENDING: 3}
    assert breaks(database) == []
    return database


def test_what_was_not_taken_is_waived_on_record_and_nothing_more_comes(shop: Database) -> None:
    ended = end(shop)
    assert (ended.by, ended.reason, ended.ended_at) == ("me", "sold", 12)
    assert counts(shop) == {DONE: 1, WAIVED: 9}
    settled = rows(shop, "SELECT DISTINCT reason, settled_by, has_run FROM deliveries WHERE status = 'waived'")
    assert settled == [("receiver ended: sold", "me", 0)]
    assert breaks(shop) == []
    spread(shop, *(f"order-{number}:placed" for number in (7, 8)))
    place(shop, 11)
    spread(shop, *publish(shop))
    with shop.write() as connection:
        publish_again(connection, "order-1:placed")
        publish_again(connection, "order-5:placed")
    assert breaks(shop) == []
    spread(shop, *publish(shop))
    assert counts(shop) == {DONE: 1, WAIVED: 9}
    assert counts(shop, "billing") == {DONE: 1, PENDING: 10}
    assert breaks(shop) == []


def test_the_others_go_on_and_the_ended_one_is_shown_no_more_as_one_that_works(shop: Database) -> None:
    end(shop)
    with shop.read() as connection:
        assert current_receivers(connection) == ["billing", "sales"]
        assert [each.receiver for each in receiver_status(connection)] == ["billing", "sales"]
        assert "mail" not in {each.stage for each in backlogs(connection, 10**9)}
        assert (subscriptions_of(connection, "mail"), list_faults(connection)) == ({}, {})


def test_added_again_it_begins_with_what_follows_and_may_be_ended_again(shop: Database) -> None:
    end(shop)
    register(shop, "mail", event_type=ORDER_PLACED)
    with shop.read() as connection:
        assert subscriptions_of(connection, "mail") == {ORDER_PLACED: 10}
        assert read_end(connection, "mail") is None
    end(shop, reason="again")  # before anything came
    register(shop, "mail", event_type=ORDER_PLACED)
    place(shop, 11, 12)
    assert breaks(shop) == []
    spread(shop, *publish(shop))
    assert counts(shop) == {DONE: 1, WAIVED: 9, PENDING: 2}
    deliver(shop, "mail", 11)
    assert breaks(shop) == []
    ended = end(shop, reason="and again")
    assert (ended.number, counts(shop)) == (3, {DONE: 2, WAIVED: 10})
    place(shop, 13)
    spread(shop, *publish(shop))
    assert breaks(shop) == []


def test_sales_may_be_ended_too_and_the_totals_stay_proved(shop: Database) -> None:
    end(shop, "sales")
    place(shop, 11)
    assert breaks(shop) == []
    spread(shop, *publish(shop))
    assert counts(shop, "sales") == {DONE: 1, WAIVED: 9}
    assert breaks(shop) == []
    register(shop, "sales", event_type=ORDER_PLACED)
    place(shop, 12)
    spread(shop, *publish(shop))
    deliver(shop, "sales", 12)
    assert breaks(shop) == []
    with shop.write() as connection:  # what is lost is found all the same
        connection.exec_driver_sql("DELETE FROM deliveries WHERE receiver = 'sales' AND position = 12")
    assert breaks(shop) != []


def test_twice_is_once_and_another_reason_is_a_conflict(shop: Database) -> None:
    first = end(shop)
    assert end(shop) == first
    assert finish(shop) == first
    with shop.write() as connection, pytest.raises(Conflict, match=r"mail was ended by me at .*: sold; nothing was"):
        begin_end(connection, "mail", "another reason", "you", 20)
    with shop.write() as connection, pytest.raises(NotFound, match="there is no receiver fax"):
        begin_end(connection, "fax", "sold", "you", 20)
    with shop.write() as connection, pytest.raises(InvalidInput, match="must say why the receiver is ended"):
        begin_end(connection, "billing", " ", "you", 20)
    assert rows(shop, "SELECT count(*) FROM receiver_ends") == [(1,)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_broken_off_after_any_step_it_goes_on_where_it_was(shop: Database, steps: int) -> None:
    with shop.write() as connection:
        begin_end(connection, "mail", "sold", "me", 10)
    for _ in range(steps):
        with shop.write() as connection:
            assert waive_chunk(connection, "mail", 11, 1) == 1
    assert breaks(shop) == []
    spread(shop, "order-7:placed")  # the pipeline goes on meanwhile
    place(shop, 11)
    spread(shop, *publish(shop))
    assert breaks(shop) == []
    with shop.write() as connection, pytest.raises(Conflict, match="mail is being ended by me since"):
        begin_end(connection, "mail", "another reason", "you", 20)
    assert end(shop).ended_at == 12
    assert counts(shop) == {DONE: 1, WAIVED: 10}
    assert breaks(shop) == []


def test_registered_again_before_the_end_it_goes_on_and_the_end_is_refused(shop: Database) -> None:
    with shop.write() as connection:
        begin_end(connection, "mail", "sold", "me", 10)
        waive_chunk(connection, "mail", 11, 1)
    register(shop, "mail", event_type=ORDER_PLACED)
    for step in (waive_chunk, finish_end):
        with shop.write() as connection, pytest.raises(Refused, match="mail was registered again meanwhile"):
            step(connection, "mail", 12, 10)
    with shop.read() as connection:
        assert subscriptions_of(connection, "mail") == {ORDER_PLACED: 0}
    assert counts(shop)[PENDING] > 0
    assert breaks(shop) == []


def test_two_at_once_end_it_once(shop: Database) -> None:
    gate = threading.Barrier(2)
    found: list[ReceiverEnd] = []

    def one() -> None:
        gate.wait()
        found.append(end(shop, limit=1))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert counts(shop) == {DONE: 1, WAIVED: 9}
    assert breaks(shop) == []


@pytest.mark.parametrize("order", ["the fan-out first", "the event first"])
def test_what_is_on_its_way_in_another_transaction_is_waited_for(postgres: Database, order: str) -> None:
    """On PostgreSQL others write at the same time, and neither their events nor their deliveries can be seen yet."""
    register(postgres, "mail", event_type=ORDER_PLACED)
    place(postgres, 1, 2)
    publish(postgres)
    with postgres.write() as connection:
        begin_end(connection, "mail", "sold", "me", 10)
    ending = threading.Thread(target=finish, args=(postgres,))
    with postgres.write() as other:
        if order == "the fan-out first":
            register_deliveries(other, [1, 2], 5)
        else:
            append_event(
                other, event_id="x", aggregate_id="a", event_type=ORDER_PLACED, payload={"amount": 1, "currency": "JPY"}
            )
            with postgres.write() as later:  # has the higher position, and is there first
                append_event(later, event_id="y", aggregate_id="b", event_type="other", payload={})
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
    ending.join()
    with postgres.write() as connection:
        fan_out(connection, [event_id.encode() for event_id in ("order-1:placed", "order-2:placed", "x")], 20)
    waived = 2 if order == "the fan-out first" else 3
    assert counts(postgres) == {WAIVED: waived}
    with postgres.read() as connection:
        lost = [each for each in audit(connection).breaks if each.invariant == "I2"]
        assert lost == []
        until = sa.text("SELECT until_position FROM ended_subscriptions")
        assert connection.execute(until).scalar_one() == 2 * waived - 2


def test_a_receiver_that_is_registered_while_it_is_ended_is_one_or_the_other(shop: Database) -> None:
    """It takes events in the end, or is ended; nothing in between, whoever came first."""
    for _ in range(5):
        gate = threading.Barrier(2)

        def again(gate: threading.Barrier = gate) -> None:
            gate.wait()
            with shop.write() as connection:
                register_receiver(connection, "mail", [ORDER_PLACED])

        thread = threading.Thread(target=again)
        thread.start()
        gate.wait()
        with contextlib.suppress(Refused):
            end(shop)
        thread.join()
        with shop.read() as connection:
            assert (read_end(connection, "mail") is None) == bool(subscriptions_of(connection, "mail"))
        assert breaks(shop) == []

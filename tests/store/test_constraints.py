"""What the databases themselves refuse, whatever code writes."""

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError

from store.engine import Database

ORDER = "INSERT INTO orders (id, sku, qty, amount, currency, placed_at) VALUES ('o', 's', {qty}, {amount}, 'JPY', 1)"
EVENT = (
    "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status)"
    " VALUES ('{event_id}', 'a', {seq}, 't', '{{}}', '{status}')"
)
GENERATION = (
    "INSERT INTO generations (generation, state, certificate, created_at) VALUES ('{name}', '{state}', {proof}, 1)"
)
DELIVERY = "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status) VALUES ('r', 1, 'a', 1, '{}')"


def _run(database: Database, *statements: str) -> None:
    with database.write() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


@pytest.mark.parametrize(
    "statement",
    [
        ORDER.format(qty=0, amount=1),
        ORDER.format(qty=-1, amount=1),
        ORDER.format(qty=1, amount=0),
        ORDER.format(qty="NULL", amount=1),
        EVENT.format(event_id="e", seq=0, status="PENDING"),
        EVENT.format(event_id="e", seq=1, status="pending"),
        EVENT.format(event_id="e", seq=1, status="LOST"),
        DELIVERY.format("held"),
        DELIVERY.format("PENDING"),
        GENERATION.format(name="g", state="ACTIVE", proof="'{}'"),  # there is an active one
        GENERATION.format(name="g", state="OTHER", proof="NULL"),
        "INSERT INTO jobs (job_id, amount, state, created_at, look_at) VALUES ('j', 0, 'RUNNING', 1, 1)",
        "INSERT INTO jobs (job_id, amount, state, created_at, look_at) VALUES ('j', 1, 'DONE', 1, 1)",
        "INSERT INTO job_steps (job_id, step, position, completed_at) VALUES ('j', 'refund', 1, 1)",
        "INSERT INTO control (id, intake, active_generation, epoch, hot_until) VALUES (2, 'OPEN', 'initial', 0, 0)",
        "UPDATE control SET intake = 'CLOSED'",
        "INSERT INTO faults (receiver, mode) VALUES ('r', 'slow')",
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(database: Database, statement: str) -> None:
    with pytest.raises(IntegrityError):
        _run(database, statement)


@pytest.mark.parametrize("value", ["1.5", "'x'", "'1.5'", "1e-3"])
@pytest.mark.parametrize(
    "statement",
    [
        ORDER.format(qty=1, amount="{0}"),
        ORDER.format(qty="{0}", amount=1),
        "INSERT INTO jobs (job_id, amount, state, created_at, look_at) VALUES ('j', {0}, 'RUNNING', 1, 1)",
        "INSERT INTO charges (job_id, amount, charged_at) VALUES ('j', {0}, 1)",
        "INSERT INTO billing_entries (position, order_id, amount, currency) VALUES (1, 'o', {0}, 'JPY')",
        "INSERT INTO sales_applied (generation, position, amount, currency) VALUES ('initial', 1, {0}, 'JPY')",
        "INSERT INTO sales_totals (generation, currency, orders, amount) VALUES ('initial', 'JPY', 1, {0})",
        "INSERT INTO sales_totals (generation, currency, orders, amount) VALUES ('initial', 'JPY', {0}, 1)",
        "INSERT INTO rebuild_expected (rebuild_id, event_id, amount, currency) VALUES ('r', 'e', {0}, 'JPY')",
    ],
)
def test_sqlite_stores_integers_only_where_money_is(sqlite: Database, statement: str, value: str) -> None:
    with pytest.raises(IntegrityError):
        _run(sqlite, statement.format(value))
    _run(sqlite, statement.format("1000000000000"))


def test_the_outbox_says_pending_by_itself_and_holds_an_id_and_a_seq_once(database: Database) -> None:
    _run(
        database,
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload) VALUES ('e', 'a', 1, 't', '{}')",
    )
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT status, position FROM outbox")).one() == ("PENDING", 1)
    for event_id, seq in (("e", 2), ("f", 1)):
        with pytest.raises(IntegrityError):
            _run(database, EVENT.format(event_id=event_id, seq=seq, status="PENDING"))


def test_a_position_is_never_given_twice(database: Database) -> None:
    _run(database, EVENT.format(event_id="e", seq=1, status="PENDING"))
    _run(database, "DELETE FROM outbox", EVENT.format(event_id="f", seq=1, status="PENDING"))
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT position FROM outbox")).scalar_one() == 2


def test_an_active_generation_needs_a_certificate_unless_it_is_the_first(database: Database) -> None:
    _run(database, GENERATION.format(name="g", state="SEALED", proof="NULL"))
    retire = "UPDATE generations SET state = 'RETIRED' WHERE generation = 'initial'"
    activate = "UPDATE generations SET state = 'ACTIVE' WHERE generation = 'g'"
    with pytest.raises(IntegrityError, match=r"active_needs_certificate"):
        _run(database, retire, activate)
    with pytest.raises(IntegrityError):
        _run(database, "UPDATE generations SET certificate = '{}'", activate)  # two at once
    _run(database, "UPDATE generations SET certificate = '{}'", retire, activate)
    with database.read() as connection:
        states = connection.execute(sa.text("SELECT generation, state FROM generations ORDER BY 1")).all()
    assert [tuple(state) for state in states] == [("g", "ACTIVE"), ("initial", "RETIRED")]


@pytest.mark.parametrize(
    "table", ["billing_entries", "mail_messages", "charges", "shipments", "job_steps", "deliveries", "sales_applied"]
)
def test_each_effect_has_a_key_of_its_own(database: Database, table: str) -> None:
    insert = {
        "billing_entries": "(position, order_id, amount, currency) VALUES (1, 'o', 1, 'JPY')",
        "mail_messages": "(position, order_id, subject) VALUES (1, 'o', 's')",
        "charges": "(job_id, amount, charged_at) VALUES ('j', 1, 1)",
        "shipments": "(job_id, shipped_at) VALUES ('j', 1)",
        "job_steps": "(job_id, step, position, completed_at) VALUES ('j', 'ship', 2, 1)",
        "deliveries": "(receiver, position, aggregate_id, seq) VALUES ('r', 1, 'a', 1)",
        "sales_applied": "(generation, position, amount, currency) VALUES ('initial', 1, 1, 'JPY')",
    }[table]
    _run(database, f"INSERT INTO {table} {insert}")
    with pytest.raises(DBAPIError):
        _run(database, f"INSERT INTO {table} {insert}")

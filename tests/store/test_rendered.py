"""Statements that go past SQLAlchemy: the same rows, and the same errors."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from contracts.errors import TransactionLost
from store.dialect import Rendered, at_most, is_foreign_outage, is_infrastructure_error, pack, value_list
from store.engine import Database
from store.schema import orders
from tests.store.scenes import rows

NAMES = ("id", "sku", "qty", "amount", "currency", "placed_at")
INSERT = Rendered(lambda _: sa.insert(orders).inline(), *NAMES)


def _find(connection: Connection) -> sa.Select[tuple[str, int]]:
    wanted = value_list(connection, "ids", str)
    return (
        sa.select(orders.c.id, orders.c.amount)
        .join_from(wanted, orders, orders.c.id == wanted.c.value)
        .where(orders.c.amount < sa.bindparam("below"), orders.c.sku != sa.literal_column("'50%'"))
        .order_by(orders.c.id)
    )


FIND = Rendered(_find, "ids", "below")


def order(order_id: str, amount: int = 1, sku: str = "tea") -> tuple[object, ...]:
    return (order_id, sku, 1, amount, "JPY", 1)


def test_rows_are_written_and_found_on_both_databases(database: Database) -> None:
    with database.write() as connection:
        INSERT.each(connection, [order("a"), order("注文", 10**12), order("b", 7, '5"0%'), order("c", 2, "50%")])
    with database.read() as connection:
        found = FIND.rows(connection, pack(connection, ["b", "注文", "a", "c", "none"]), 10**12 + 1)
        assert [tuple(row) for row in found] == [("a", 1), ("b", 7), ("注文", 10**12)]
        assert [*FIND.rows(connection, pack(connection, ["注文"]), 10**12)] == []


AS_PLACED = Rendered(
    lambda _: at_most(
        sa.select(orders.c.id, orders.c.sku, sa.func.nullif(orders.c.amount, sa.literal_column("7")).label("amount"))
        .where(orders.c.qty == sa.bindparam("of"))
        .order_by(orders.c.amount.desc()),
        "limit",
    ),
    "of",
    "limit",
)


def test_many_rows_are_those_that_a_few_are_in_the_same_order(database: Database) -> None:
    odd = ['"', "注文\n\\", "😀'", "50%", "\x7f\u2028"]
    with database.write() as connection:
        INSERT.each(connection, [order(f"o-{number}", number, odd[number % 5]) for number in range(1, 2500)])
    with database.read() as connection:
        for limit in (1, 2, 2000, 9999):
            many = [tuple(row) for row in AS_PLACED.many(connection, 1, limit)]
            assert many == [tuple(row) for row in AS_PLACED.rows(connection, 1, limit)]
            assert many[0] == ("o-2499", odd[4], 2499)
            assert len(many) == min(limit, 2499)
        assert many[-7][2] is None
        assert list(AS_PLACED.many(connection, 2, 5)) == []


def test_counts_what_it_wrote(database: Database) -> None:
    double = Rendered(
        lambda _: (
            sa.update(orders)
            .where(orders.c.amount > sa.bindparam("least"))
            .values(amount=orders.c.amount * sa.literal_column("2"))
        ),
        "least",
    )
    with database.write() as connection:
        INSERT.each(connection, [order("a", 1), order("b", 2), order("c", 3)])
        assert [double.count(connection, 1), double.count(connection, 100)] == [2, 0]
    assert rows(database, "SELECT amount FROM orders ORDER BY id") == [(1,), (4,), (6,)]


def test_what_the_database_refuses_is_the_statement_s_error_and_keeps_nothing(database: Database) -> None:
    for refused in (order("b", 0), order("a")):
        with pytest.raises(IntegrityError) as raised, database.write() as connection:
            INSERT.each(connection, [order("a"), refused])
        assert not is_infrastructure_error(raised.value)
        assert rows(database, "SELECT id FROM orders") == []


def test_a_full_disk_is_an_error_of_our_own_database_and_ends_the_transaction(sqlite: Database) -> None:
    def fill() -> None:
        with sqlite.write() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")  # it takes what there is as the least
            INSERT.each(connection, [order(f"{number}-" + "x" * 2000) for number in range(2000)])

    with pytest.raises(DBAPIError, match="full") as raised:
        fill()
    assert is_infrastructure_error(raised.value)
    assert not is_foreign_outage(raised.value)
    assert rows(sqlite, "SELECT id FROM orders") == []


def test_nothing_is_written_outside_of_a_transaction(sqlite: Database) -> None:
    def outside(work: Callable[[Connection], object]) -> None:
        with sqlite.write() as connection:
            connection.connection.driver_connection.execute("ROLLBACK")  # type: ignore[union-attr]
            work(connection)

    for work in (
        lambda connection: INSERT.each(connection, [order("a")]),
        lambda connection: FIND.rows(connection, pack(connection, ["a"]), 5),
    ):
        with pytest.raises(TransactionLost):
            outside(work)
    assert rows(sqlite, "SELECT id FROM orders") == []


def test_a_writer_after_a_transaction_that_failed_begins_afresh(sqlite: Database) -> None:
    kept = []
    for fails in (False, False, True, False):
        try:
            with sqlite.write() as connection:
                kept.append(connection)
                INSERT.each(connection, [order(f"order-{len(kept)}")])
                if fails:
                    raise ValueError("in the middle")
        except ValueError:
            continue
    assert kept[0] is kept[1] is kept[2] is not kept[3]
    assert kept[2].closed
    assert sorted(row[0] for row in rows(sqlite, "SELECT id FROM orders")) == ["order-1", "order-2", "order-4"]


def test_a_statement_tells_of_names_that_are_not_its_parameters(database: Database) -> None:
    with pytest.raises(AssertionError), database.read() as connection:
        Rendered(_find, "below", "ids").rows(connection, 1, pack(connection, ["a"]))

"""Reconciliation names every difference between the orders and a generation, whichever way it came about."""

import json
from collections.abc import Callable
from hashlib import sha256

import pytest

from contracts.orders import Order
from store.engine import Database
from tests.store.rebuilding import (
    CERTIFIED,
    REPLAYED,
    SEALED,
    begin,
    certify,
    execute,
    history,
    reach,
    reconcile,
)
from tests.store.scenes import append, order, publish, spread

_TOTALS = "UPDATE sales_totals SET {} WHERE generation = 'generation-1' AND currency = '{}'"


def _ready(database: Database) -> str:
    """Orders 1 to 6 in yen, 7 and 8 in euro, replayed."""
    history(database, [*range(1, 7), order(7, currency="EUR"), order(8, currency="EUR")])
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED)
    return rebuild_id


def _change(database: Database, number: int, change: str) -> None:
    execute(
        database,
        f"UPDATE sales_applied SET {change} WHERE generation = 'generation-1' AND position = "
        f"(SELECT position FROM outbox WHERE event_id = 'order-{number}:placed')",
    )


def _remove(database: Database, number: int) -> None:
    execute(
        database,
        "DELETE FROM sales_applied WHERE generation = 'generation-1' AND position = "
        f"(SELECT position FROM outbox WHERE event_id = 'order-{number}:placed')",
    )


def _event(database: Database, event_id: str, amount: int) -> None:
    """An event that no order tells of, in the outbox and in the generation."""
    execute(
        database,
        "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload, status, fanned_out_at) VALUES "
        f"('{event_id}', 'order/{event_id}', 1, 'order-placed', '{{}}', 'PUBLISHED', 1)",
    )
    execute(
        database,
        "INSERT INTO sales_applied (generation, position, amount, currency) "
        f"SELECT 'generation-1', position, {amount}, 'JPY' FROM outbox WHERE event_id = '{event_id}'",
    )


def _missing(database: Database) -> None:
    _remove(database, 3)
    execute(database, _TOTALS.format("orders = orders - 1, amount = amount - 300", "JPY"))


def _extra(database: Database) -> None:
    _event(database, "ghost:placed", 50)
    execute(database, _TOTALS.format("orders = orders + 1, amount = amount + 50", "JPY"))


def _extra_in_the_middle(database: Database) -> None:
    _event(database, "order-3a:placed", 50)
    execute(database, _TOTALS.format("orders = orders + 1, amount = amount + 50", "JPY"))


def _other_amount(database: Database) -> None:
    _change(database, 3, "amount = 301")
    execute(database, _TOTALS.format("amount = amount + 1", "JPY"))


def _swapped(database: Database) -> None:
    _change(database, 2, "amount = 300")
    _change(database, 3, "amount = 200")


def _wrong_ids(database: Database) -> None:
    _remove(database, 3)
    _event(database, "ghost:placed", 300)


def _other_currency(database: Database) -> None:
    _change(database, 3, "currency = 'EUR'")
    execute(database, _TOTALS.format("orders = orders - 1, amount = amount - 300", "JPY"))
    execute(database, _TOTALS.format("orders = orders + 1, amount = amount + 300", "EUR"))


def _totals_off(database: Database) -> None:
    execute(database, _TOTALS.format("amount = amount + 1", "EUR"))


def _totals_missing(database: Database) -> None:
    execute(database, "DELETE FROM sales_totals WHERE generation = 'generation-1' AND currency = 'EUR'")


def _no_event_at_all(database: Database) -> None:
    execute(
        database,
        "INSERT INTO sales_applied (generation, position, amount, currency) VALUES ('generation-1', 999, 1, 'JPY')",
    )


def _no_event_for_a_missing_one(database: Database) -> None:
    _remove(database, 3)
    execute(
        database,
        "INSERT INTO sales_applied (generation, position, amount, currency) VALUES ('generation-1', 999, 300, 'JPY')",
    )


DOCTORED: dict[str, tuple[Callable[[Database], None], list[str]]] = {
    "missing": (
        _missing,
        ["missing: order-3:placed", "totals: JPY expected 6 orders, 2100; rows hold 5, 1800; totals say 5, 1800"],
    ),
    "extra": (
        _extra,
        ["unexpected: ghost:placed", "totals: JPY expected 6 orders, 2100; rows hold 7, 2150; totals say 7, 2150"],
    ),
    "extra in the middle": (
        _extra_in_the_middle,
        ["unexpected: order-3a:placed", "totals: JPY expected 6 orders, 2100; rows hold 7, 2150; totals say 7, 2150"],
    ),
    "other amount": (
        _other_amount,
        [
            "different: order-3:placed (expected 300 JPY, found 301 JPY)",
            "totals: JPY expected 6 orders, 2100; rows hold 6, 2101; totals say 6, 2101",
        ],
    ),
    "two amounts swapped": (
        _swapped,
        [
            "different: order-2:placed (expected 200 JPY, found 300 JPY), "
            "order-3:placed (expected 300 JPY, found 200 JPY)"
        ],
    ),
    "right sums with wrong ids": (_wrong_ids, ["missing: order-3:placed", "unexpected: ghost:placed"]),
    "other currency": (
        _other_currency,
        [
            "different: order-3:placed (expected 300 JPY, found 300 EUR)",
            "totals: EUR expected 2 orders, 1500; rows hold 3, 1800; totals say 3, 1800, "
            "JPY expected 6 orders, 2100; rows hold 5, 1800; totals say 5, 1800",
        ],
    ),
    "totals row off": (
        _totals_off,
        ["totals: EUR expected 2 orders, 1500; rows hold 2, 1500; totals say 2, 1501"],
    ),
    "totals row missing": (
        _totals_missing,
        ["totals: EUR expected 2 orders, 1500; rows hold 2, 1500; totals say 0, 0"],
    ),
    "a row of no event": (
        _no_event_at_all,
        [
            "unexpected: position 999, where there is no event",
            "totals: JPY expected 6 orders, 2100; rows hold 7, 2101; totals say 6, 2100",
        ],
    ),
    "a row of no event in place of one that is missing": (
        _no_event_for_a_missing_one,
        ["missing: order-3:placed", "unexpected: position 999, where there is no event"],
    ),
}


@pytest.mark.parametrize("kind", DOCTORED)
@pytest.mark.parametrize("sealed", [False, True], ids=["building", "sealed"])
def test_a_doctored_generation_is_caught_and_the_difference_named(database: Database, kind: str, sealed: bool) -> None:
    doctor, problems = DOCTORED[kind]
    rebuild_id = _ready(database)
    if sealed:
        reach(database, rebuild_id, SEALED)
    equal = reconcile(database, rebuild_id)
    assert equal.problems() == []
    doctor(database)
    for limit in (1000, 8, 3, 1):
        found = reconcile(database, rebuild_id, limit=limit)
        named = found.problems()
        # The same ids whatever the ranges; only their order within a kind may differ.
        assert [sorted(each.split(", ")) for each in named] == [sorted(each.split(", ")) for each in problems], limit
    if kind not in ("totals row off", "totals row missing", "a row of no event"):
        assert found.digest != equal.digest


def test_a_difference_in_each_of_many_events_names_some_and_says_that_there_are_more(database: Database) -> None:
    history(database, range(1, 61))
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED)
    execute(database, "UPDATE sales_applied SET amount = amount + 1 WHERE generation = 'generation-1'")
    for limit in (1000, 7):
        [different, _] = reconcile(database, rebuild_id, limit=limit).problems()
        assert different.count(" (expected ") == 20
        assert different.endswith(", ...")
        assert different.count("...") == 1


def test_an_empty_generation_beside_many_orders_names_what_is_missing(database: Database) -> None:
    history(database, range(1, 4))
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED)
    execute(database, "DELETE FROM sales_applied WHERE generation = 'generation-1'")
    execute(database, "DELETE FROM sales_totals WHERE generation = 'generation-1'")
    for limit in (1000, 1):
        missing, totals = reconcile(database, rebuild_id, limit=limit).problems()
        assert missing == "missing: order-1:placed, order-2:placed, order-3:placed"
        assert totals == "totals: JPY expected 3 orders, 600; rows hold 0, 0; totals say 0, 0"


ODD = ["a b", "a", "a-b", "a:placed", "Ä", "ä ö", "注文 7", "z", "Z", "🎁", "a'b", "a%b_c", '"quoted"', "0"]


def _odd_orders() -> list[Order]:
    return [
        order(number, id=name, currency="EUR" if number % 3 == 0 else "JPY") for number, name in enumerate(ODD, start=1)
    ]


def test_ids_with_spaces_and_beyond_ascii_compare_equal_and_are_named_whole(database: Database) -> None:
    history(database, _odd_orders())
    rebuild_id = begin(database)
    reach(database, rebuild_id, REPLAYED, chunk=3)
    for limit in (1000, 1, 4):
        assert reconcile(database, rebuild_id, limit=limit).problems() == []
    execute(database, "UPDATE sales_applied SET amount = amount + 1 WHERE generation = 'generation-1' AND position = 2")
    execute(database, "UPDATE sales_applied SET amount = amount + 1 WHERE generation = 'generation-1' AND position = 1")
    [different, _] = reconcile(database, rebuild_id).problems()
    assert different == (
        "different: a b:placed (expected 100 JPY, found 101 JPY), a:placed (expected 200 JPY, found 201 JPY)"
    )


def test_the_digest_goes_over_the_ids_in_binary_order_on_both_databases_and_in_any_ranges(database: Database) -> None:
    orders = _odd_orders()
    history(database, orders)
    lines = sorted((f"{each.id}:placed", f"{each.amount} {each.currency}") for each in orders)
    # UTF-8 sorts as code points do.
    digest = sha256("".join(f"{event_id} {what}\n" for event_id, what in lines).encode()).hexdigest()
    rebuild_id = begin(database)
    reach(database, rebuild_id, SEALED, chunk=4)
    assert {reconcile(database, rebuild_id, limit=limit).digest for limit in (1000, 1, 3, len(ODD))} == {digest}
    certificate = json.loads(certify(database, rebuild_id))
    assert certificate["digest"] == f"sha256:{digest}"
    assert certificate["orders"] == len(ODD)
    assert certificate["sums"] == {
        code: [
            sum(each.currency == code for each in orders),
            sum(each.amount for each in orders if each.currency == code),
        ]
        for code in ("EUR", "JPY")
    }


def test_the_largest_amounts_add_up(database: Database) -> None:
    history(database, [order(number, amount=10**12) for number in range(1, 31)])
    rebuild_id = begin(database)
    reach(database, rebuild_id, CERTIFIED)
    assert reconcile(database, rebuild_id).problems() == []


def test_other_events_between_the_orders_are_no_part_of_the_comparison(database: Database) -> None:
    append(database, "job/order-1", 1, 2)
    append(database, "zz", 1)
    history(database, range(1, 4))
    append(database, "order-2", 7)
    spread(database, *publish(database))
    rebuild_id = begin(database)
    reach(database, rebuild_id, CERTIFIED, chunk=1)
    found = reconcile(database, rebuild_id, limit=2)
    assert (found.count, found.problems()) == (3, [])

"""Whatever is done by hand to the rows of a new generation, the saga's own comparison names it, and nothing else."""

import json
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from contracts.events import ORDER_PLACED
from contracts.messages import RebuildInput
from contracts.orders import MAX_AMOUNT, Order
from store.generations import list_generations
from store.orders import place_order
from store.outbox import append_event
from store.rebuild import get_rebuild
from store.schema import outbox, sales_applied, sales_totals
from tests.properties.strategies import amounts, indexes, orders, sizes
from tests.properties.world import World

# Event id -> (amount, currency): what a generation says of each event.
Content = dict[str, tuple[int, str]]
GENERATION = "generation-1"
GHOSTS = ["ghost-1:placed", "order-3a:placed", "~:placed"]  # events of no order: before, between and after the others


def _rebuilt(world: World, placed: list[Order], *, sealed: bool, width: int) -> tuple[str, Content]:
    """A rebuild of these orders, equal so far, and its generation's content."""
    world.begin()
    for order in placed:
        world.transaction(lambda connection, order=order: place_order(connection, order, 1))
    world.flow()
    while world.take("sales", 1000):
        pass
    begun = world.begin_rebuild("run-1", RebuildInput())
    assert begun is not None
    for phase in ("await_drained", "replay", *(["seal"] if sealed else [])):
        world.phase(phase, begun.rebuild_id, width)
    return begun.rebuild_id, {f"{order.id}:placed": (order.amount, order.currency) for order in placed}


def _write(world: World, content: Content, *, totals_too: bool) -> None:
    """The generation's rows become `content`, and its totals their sums if they are doctored along."""

    def write(connection: Connection) -> None:
        for ghost in content.keys() & set(GHOSTS):
            append_event(connection, event_id=ghost, aggregate_id=ghost, event_type=ORDER_PLACED, payload={})
        positions = dict(connection.execute(sa.select(outbox.c.event_id, outbox.c.position)).all())
        connection.execute(sa.delete(sales_applied).where(sales_applied.c.generation == GENERATION))
        rows = [
            {"generation": GENERATION, "position": positions[name], "amount": amount, "currency": currency}
            for name, (amount, currency) in content.items()
        ]
        if rows:
            connection.execute(sa.insert(sales_applied), rows)
        if totals_too:
            connection.execute(sa.delete(sales_totals).where(sales_totals.c.generation == GENERATION))
            for currency, (count, amount) in _sums(content).items():
                connection.execute(
                    sa.insert(sales_totals).values(
                        generation=GENERATION, currency=currency, orders=count, amount=amount
                    )
                )

    world.transaction(write)


def _sums(content: Content) -> dict[str, tuple[int, int]]:
    return {
        code: (sum(each[1] == code for each in content.values()), sum(a for a, c in content.values() if c == code))
        for code in sorted({currency for _, currency in content.values()})
    }


def _problems(right: Content, wrong: Content) -> list[str]:
    """What must be named: ids in binary order, which is that of their characters."""
    missing = sorted(right.keys() - wrong.keys())
    unexpected = sorted(wrong.keys() - right.keys())
    different = [
        f"{name} (expected {right[name][0]} {right[name][1]}, found {wrong[name][0]} {wrong[name][1]})"
        for name in sorted(right.keys() & wrong.keys())
        if right[name] != wrong[name]
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "different": different}
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def _compared(world: World, rebuild_id: str, width: int, *, sealed: bool) -> list[str]:
    report = world.phase("certify" if sealed else "reconcile", rebuild_id, width)
    problems: list[str] = report.problems
    return problems


@st.composite
def _doctored(draw: st.DrawFn, right: Content) -> Content:
    """The content after some changes by hand, which may undo each other."""
    wrong = dict(right)
    for _ in range(draw(st.integers(1, 4))):
        names = sorted(wrong)
        kind = draw(st.sampled_from(["none", "missing", "extra", "amount", "currency", "swap", "wrong id"]))
        if kind == "extra":
            wrong[draw(st.sampled_from(GHOSTS))] = (draw(amounts), "JPY")
        elif names and kind != "none":
            one, other = (names[draw(indexes) % len(names)] for _ in range(2))
            if kind == "missing":
                del wrong[one]
            elif kind == "amount":
                wrong[one] = (draw(amounts), wrong[one][1])
            elif kind == "currency":
                wrong[one] = (wrong[one][0], draw(st.sampled_from(["JPY", "EUR"])))
            elif kind == "swap":
                wrong[one], wrong[other] = wrong[other], wrong[one]
            else:
                wrong[draw(st.sampled_from(GHOSTS))] = wrong.pop(one)
    return wrong


@settings(max_examples=settings.default.max_examples // 6)
@given(
    placed=st.lists(orders, max_size=9, unique_by=lambda order: order.id),
    sealed=st.booleans(),
    totals_too=st.booleans(),
    width=sizes,
    data=st.data(),
)
def test_what_changes_the_content_is_named_and_what_does_not_is_not(
    world: World, placed: list[Order], sealed: bool, totals_too: bool, width: int, data: st.DataObject
) -> None:
    rebuild_id, right = _rebuilt(world, placed, sealed=sealed, width=width)
    assert _compared(world, rebuild_id, width, sealed=sealed) == []
    wrong = data.draw(_doctored(right))
    _write(world, wrong, totals_too=totals_too)
    named = _compared(world, rebuild_id, width, sealed=sealed)
    assert [each for each in named if not each.startswith("totals: ")] == _problems(right, wrong)
    sums = [each for each in named if each.startswith("totals: ")]
    assert bool(sums) == (_sums(wrong) != _sums(right))
    for code in _sums(right) | _sums(wrong):
        off = _sums(right).get(code) != _sums(wrong).get(code)
        assert (f"{code} expected" in "".join(sums)) == off


def _without(content: Content) -> Content:
    return {name: what for name, what in content.items() if name != "order-3:placed"}


KINDS: dict[str, tuple[Callable[[Content], Content], list[str]]] = {
    "missing": (_without, ["missing: order-3:placed", "totals"]),
    "extra": (lambda right: right | {"ghost-1:placed": (50, "JPY")}, ["unexpected: ghost-1:placed", "totals"]),
    "other amount": (
        lambda right: right | {"order-3:placed": (301, "JPY")},
        ["different: order-3:placed (expected 300 JPY, found 301 JPY)", "totals"],
    ),
    "two amounts swapped": (
        lambda right: right | {"order-2:placed": (300, "JPY"), "order-3:placed": (200, "JPY")},
        [
            "different: order-2:placed (expected 200 JPY, found 300 JPY), "
            "order-3:placed (expected 300 JPY, found 200 JPY)"
        ],
    ),
    "right sums with wrong ids": (
        lambda right: _without(right) | {"ghost-1:placed": (300, "JPY")},
        ["missing: order-3:placed", "unexpected: ghost-1:placed"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sealed", [False, True], ids=["building", "sealed"])
def test_each_kind_is_caught_by_the_saga_and_proves_nothing(world: World, kind: str, sealed: bool) -> None:
    placed = [Order(f"order-{number}", "sku", 1, 100 * number, "JPY") for number in range(1, 6)]
    rebuild_id, right = _rebuilt(world, placed, sealed=sealed, width=2)
    doctor, named = KINDS[kind]
    _write(world, doctor(right), totals_too=True)
    found = _compared(world, rebuild_id, 2, sealed=sealed)
    assert [each.partition(" ")[0].rstrip(":") if each.startswith("totals") else each for each in found] == named
    with world.database.read() as connection:
        assert get_rebuild(connection, rebuild_id).certificate is None
        assert {each.generation: each.certificate for each in list_generations(connection)}[GENERATION] is None


def test_a_certificate_of_huge_amounts_says_what_there_is(world: World) -> None:
    placed = [Order(f"order-{number}", "sku", 1, MAX_AMOUNT, "JPY") for number in range(1, 8)]
    rebuild_id, _ = _rebuilt(world, placed, sealed=True, width=3)
    assert _compared(world, rebuild_id, 3, sealed=True) == []
    with world.database.read() as connection:
        text = get_rebuild(connection, rebuild_id).certificate
    assert text is not None
    certificate = json.loads(text)
    assert (certificate["orders"], certificate["sums"]) == (7, {"JPY": [7, 7 * MAX_AMOUNT]})

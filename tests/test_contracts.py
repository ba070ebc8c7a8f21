"""What is accepted from outside: every field of an order, ids, amounts; and the ids derived from them."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contracts import errors
from contracts.errors import Conflict, IntakePaused, InvalidInput, Refused, SaiseiError
from contracts.events import Event, payload_text
from contracts.identifiers import (
    id_problem,
    job_aggregate,
    order_aggregate,
    order_placed_id,
    order_shipped_id,
    payment_captured_id,
    require_id,
)
from contracts.orders import CURRENCIES, MAX_AMOUNT, MAX_QTY, Order, parse_order, require_amount

GOOD = {"id": "order-7", "sku": "sku-1", "qty": 2, "amount": 700, "currency": "JPY"}

BAD_IDS = [
    None, 7, True, b"order-7", ["order-7"], {}, "", " ", "\t", "\n", " a", "a ", "a\n", "a" * 201, "🛒" * 201, "a\0b",
    "a\x1fb", "a\x7fb", "a\u0085b", "a\u2028b", "a\u200bb", "a\u202eb", "\ud800", "a\udfffb", "\ufeffa",
]  # fmt: skip
BAD_AMOUNTS = [
    None, True, False, 0, -1, 1.0, 1.5, float("nan"), float("inf"), "1", "", b"1", [1], {}, 10**12 + 1,
    10**5000, -(10**5000),
]  # fmt: skip


def _short(value: object) -> str:
    return f"{value.bit_length()} bits" if isinstance(value, int) else repr(value)


def _fields(**changes: Any) -> dict[str, str]:
    with pytest.raises(InvalidInput) as raised:
        parse_order(GOOD | changes)
    return raised.value.fields


def test_a_good_order_is_taken_as_it_is() -> None:
    assert parse_order(GOOD) == Order("order-7", "sku-1", 2, 700, "JPY")
    assert parse_order(GOOD).payload() == {
        "order_id": "order-7",
        "sku": "sku-1",
        "qty": 2,
        "amount": 700,
        "currency": "JPY",
    }


@pytest.mark.parametrize("field", ["id", "sku"])
@pytest.mark.parametrize("value", BAD_IDS, ids=repr)
def test_a_bad_id_is_refused_by_its_field(field: str, value: object) -> None:
    assert list(_fields(**{field: value})) == [field]


@pytest.mark.parametrize("value", ["a", "a" * 200, "🛒" * 200, "注文 7", "a b", "..", "7", "é", "a/b:c"])
def test_a_good_id_is_taken(value: str) -> None:
    assert id_problem(value) is None
    assert require_id(value, "order") == value
    assert parse_order(GOOD | {"id": value, "sku": value}).id == value


@pytest.mark.parametrize(("field", "most"), [("amount", MAX_AMOUNT), ("qty", MAX_QTY)])
def test_the_bounds_of_integers_are_inclusive(field: str, most: int) -> None:
    for value in (1, most):
        assert getattr(parse_order(GOOD | {field: value}), field) == value
    for value in (0, most + 1):
        assert list(_fields(**{field: value})) == [field]


@pytest.mark.parametrize("field", ["amount", "qty"])
@pytest.mark.parametrize("value", BAD_AMOUNTS, ids=_short)
def test_a_bad_integer_is_refused_by_its_field(field: str, value: object) -> None:
    assert list(_fields(**{field: value})) == [field]


@pytest.mark.parametrize("value", BAD_AMOUNTS, ids=_short)
def test_a_bad_amount_of_a_job_is_refused_by_its_field(value: object) -> None:
    with pytest.raises(InvalidInput, match="sum: must be"):
        require_amount(value, "sum")
    assert require_amount(10**12) == 10**12


@pytest.mark.parametrize(
    "value", [None, "", "jpy", "JPY ", "XYZ", "XXX", 392, True, ["JPY"], {"JPY": 1}, {"JPY"}], ids=repr
)
def test_a_currency_that_is_none_is_refused_by_its_field(value: object) -> None:
    assert list(_fields(currency=value)) == ["currency"]


def test_currencies_are_three_capitals() -> None:
    assert {"JPY", "EUR", "USD", "XCG"} < CURRENCIES
    assert all(len(code) == 3 and code.isascii() and code.isupper() for code in CURRENCIES)


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_order({name: value for name, value in GOOD.items() if name != field})
    assert list(raised.value.fields) == [field]


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_order({"quantity": 1, "amount": "12"})
    assert sorted(raised.value.fields) == ["amount", "currency", "id", "qty", "quantity", "sku"]
    assert "\n" not in str(raised.value)


def test_an_unknown_field_with_an_endless_name_is_named_in_short() -> None:
    (name,) = _fields(**{"x" * 10**6: 1})
    assert len(name) <= 200


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "extra"]), anything))
def test_whatever_comes_in_is_an_order_or_an_invalid_input(changes: dict[str, Any]) -> None:
    try:
        order = parse_order(GOOD | changes)
    except InvalidInput as error:
        named = error.fields
    else:
        named = {}
        assert (type(order.amount), type(order.qty)) == (int, int)
        payload_text(order.payload()).encode()
    assert named.keys() <= {*GOOD, "extra"}


@given(st.text(st.characters(exclude_categories=()), max_size=220))
def test_an_accepted_id_can_be_stored_and_sent_anywhere(value: str) -> None:
    assume(id_problem(value) is None)
    assert 1 <= len(value) <= 200
    assert value.encode().decode() == value
    assert "\0" not in value
    assert len(payment_captured_id(value)) <= 255


@given(st.text(min_size=1), st.text(min_size=1))
def test_no_two_facts_share_an_event_id(one: str, other: str) -> None:
    makers = (order_placed_id, payment_captured_id, order_shipped_id)
    ids = [maker(value) for maker in makers for value in {one, other}]
    assert len(set(ids)) == len(ids)
    assert (order_aggregate(one) == order_aggregate(other)) == (one == other)
    assert order_aggregate(one) != job_aggregate(other)


def test_event_ids_are_made_of_the_business_key() -> None:
    assert order_placed_id("order-7") == "order-7:placed"
    assert payment_captured_id("job-1") == "job-1:payment-captured"
    assert order_shipped_id("job-1") == "job-1:order-shipped"
    assert (order_aggregate("order-7"), job_aggregate("job-1")) == ("order/order-7", "job/job-1")


@pytest.mark.parametrize("value", BAD_IDS, ids=repr)
def test_require_id_names_the_field(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^job: must"):
        require_id(value, "job")


def test_equal_payloads_are_equal_texts_and_come_back() -> None:
    text = payload_text({"b": 1, "a": "注文"})
    assert text == payload_text({"a": "注文", "b": 1}) == '{"a":"注文","b":1}'
    assert Event(1, "e", "a", 1, "t", text).payload == {"a": "注文", "b": 1}


def test_a_number_that_json_does_not_know_is_no_payload() -> None:
    with pytest.raises(ValueError, match="JSON"):
        payload_text({"amount": float("nan")})


def test_every_error_is_one_of_ours_and_one_sentence() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, SaiseiError) for kind in kinds)
    assert isinstance(IntakePaused("rebuild-1"), Refused)
    assert str(IntakePaused()) == "order intake paused"
    assert str(Conflict("x")) == "x"

"""What goes in comes out the same, whatever letters and numbers it is made of: JSON, both databases, the list."""

import json
from typing import Any

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events import ORDER_PLACED, payload_text
from contracts.identifiers import order_aggregate, order_placed_id
from contracts.orders import Order, parse_order
from store.orders import get_order, place_order
from store.outbox import append_event, events_of, find_event
from store.schema import billing_entries, mail_messages
from tests.properties.strategies import any_ids, any_orders
from tests.properties.world import World

# What JSON can hold, and PostgreSQL's text too.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
payloads = st.dictionaries(
    texts,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**18), 10**18)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
)


@given(order=any_orders)
def test_an_order_is_what_its_fields_and_its_event_say(order: Order) -> None:
    fields = {name: value for name, value in order.payload().items() if name != "order_id"} | {"id": order.id}
    assert parse_order(json.loads(json.dumps(fields))) == order
    assert json.loads(payload_text(order.payload())) == order.payload()


@given(payload=payloads)
def test_a_payload_has_one_text_and_comes_back_from_it(payload: dict[str, Any]) -> None:
    text = payload_text(payload)
    assert json.loads(text) == payload
    assert payload_text(json.loads(text)) == text
    assert payload_text(dict(reversed(payload.items()))) == text


@settings(max_examples=settings.default.max_examples // 4)
@given(order=any_orders)
def test_an_order_goes_through_the_store_the_list_and_the_receivers_unchanged(world: World, order: Order) -> None:
    world.begin()
    assert world.transaction(lambda connection: place_order(connection, order, 1)).created
    assert not world.transaction(lambda connection: place_order(connection, order, 2)).created
    world.flow()
    for receiver in ("billing", "mail", "sales"):
        while world.take(receiver, 1000):
            pass
    with world.database.read() as connection:
        for name in (order.id, order_placed_id(order.id)):
            assert get_order(connection, name).order == order
            assert find_event(connection, name).event.payload == order.payload()
        [row] = events_of(connection, order_aggregate(order.id))
        assert (row.event.event_type, row.fanned_out_at is not None) == (ORDER_PLACED, True)
        assert [tuple(entry[1:]) for entry in connection.execute(sa.select(*billing_entries.c))] == [
            (order.id, order.amount, order.currency)
        ]
        assert list(connection.execute(sa.select(mail_messages.c.order_id)).scalars()) == [order.id]


@settings(max_examples=settings.default.max_examples // 4)
@given(event_id=any_ids, aggregate_id=any_ids, event_type=any_ids, payload=payloads)
def test_an_event_comes_back_from_the_store_as_it_was_told(
    world: World, event_id: str, aggregate_id: str, event_type: str, payload: dict[str, Any]
) -> None:
    world.begin()
    told = {"event_id": event_id, "aggregate_id": aggregate_id, "event_type": event_type, "payload": payload}
    first, new = world.transaction(lambda connection: append_event(connection, **told))
    again, repeated = world.transaction(lambda connection: append_event(connection, **told))
    assert (new, repeated, again) == (True, False, first)
    with world.database.read() as connection:
        found = find_event(connection, event_id).event
    assert found == first
    assert found.payload == payload

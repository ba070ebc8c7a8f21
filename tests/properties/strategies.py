"""What may come in: orders of any id, amount and currency, entries that are none, and deaths at any instant."""

from dataclasses import dataclass

from hypothesis import strategies as st

from contracts.identifiers import MAX_ID_LENGTH, id_problem
from contracts.orders import CURRENCIES, MAX_AMOUNT, MAX_QTY, Order

# Ids that once broke something somewhere: quotes, LIKE's letters, colons that look like a suffix, combining letters.
ODD_IDS = (
    "a", "a:placed", "a b", "O'Neill", '"quoted"', "100%_x", "back\\slash", "x:y:z", "注文 7", "é", "e\u0301", "🎁",
    "null", "[1]", "{}", "--", "$1 ?", "9" * MAX_ID_LENGTH, "🛒" * MAX_ID_LENGTH,
)  # fmt: skip

any_ids = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=MAX_ID_LENGTH).filter(
    lambda value: id_problem(value) is None
)
ids = st.sampled_from([f"order-{number}" for number in range(1, 9)]) | st.sampled_from(ODD_IDS) | any_ids
amounts = st.sampled_from([1, 2, 99, 100, MAX_AMOUNT - 1, MAX_AMOUNT]) | st.integers(1, MAX_AMOUNT)
any_orders = st.builds(
    Order, any_ids, any_ids, st.integers(1, MAX_QTY), amounts, currency=st.sampled_from(sorted(CURRENCIES))
)
# Few ids and few contents, so that the same order comes again, and the same id with another content.
orders = st.builds(
    Order,
    id=ids,
    sku=st.sampled_from(["sku-1", "sku-2"]),
    qty=st.sampled_from([1, MAX_QTY]),
    amount=amounts,
    currency=st.sampled_from(["JPY", "EUR", "KWD"]),
)
indexes = st.integers(0, 40)  # of whatever there is, counted round
sizes = st.sampled_from([1, 2, 3, 7, 1000])  # of a batch or a chunk

junk = st.sampled_from(
    [
        b"",
        b"no event",
        b"\xff\xfe",
        b"nul\0nul",
        b"a:placed ",
        b"{}",
        b"x" * 5000,
        "ü".encode("latin-1"),
        b"\xed\xa0\x80",
    ]
) | st.binary(max_size=20)


@dataclass(frozen=True)
class Death:
    """The worker dies at the `write`th write transaction from here, `committed` or not; or, with `write` 0, at its next
    call to Redis: after a push, before a removal."""

    write: int
    committed: bool = True


deaths = st.none() | st.just(Death(0)) | st.builds(Death, st.integers(1, 6), st.booleans())

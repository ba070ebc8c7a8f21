"""An order and the rules that it must satisfy before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidInput
from contracts.identifiers import MAX_ID_LENGTH, id_problem

MAX_AMOUNT = 10**12
MAX_QTY = 10**9
# ISO 4217 codes in current use (list one), without funds and metal codes: amounts are minor units of these.
_CODES = """
AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF
CHF CLP CNY COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GNF GTQ GYD HKD
HNL HTG HUF IDR ILS INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT LAK LBP LKR LRD LSL LYD
MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD OMR PAB PEN PGK PHP PKR PLN
PYG QAR RON RSD RUB RWF SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TND TOP TRY
TTD TWD TZS UAH UGX USD UYU UZS VED VES VND VUV WST XAF XCD XCG XOF XPF YER ZAR ZMW ZWG
"""
CURRENCIES = frozenset(_CODES.split())


@dataclass(frozen=True)
class Order:
    """What a customer placed. `amount` is an integer count of the currency's minor units, 1 to 10^12."""

    id: str
    sku: str
    qty: int
    amount: int
    currency: str

    def payload(self) -> dict[str, Any]:
        """The body of the order's `order-placed` event."""
        return {
            "order_id": self.id,
            "sku": self.sku,
            "qty": self.qty,
            "amount": self.amount,
            "currency": self.currency,
        }


def _integer_problem(value: object, low: int, high: int) -> str | None:
    # bool is an int to Python; `true` as a quantity is a caller's mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        return f"must be an integer from {low:,} to {high:,}"
    if not low <= value <= high:
        return f"must be from {low:,} to {high:,}"
    return None


def parse_order(fields: Mapping[str, Any]) -> Order:
    """The order that `fields` describe (id, sku, qty, amount, currency).

    Raises InvalidInput with every field that is missing, unknown or unusable.
    """
    problems: dict[str, str] = {}
    for name in ("id", "sku"):
        problem = id_problem(fields.get(name))
        if problem:
            problems[name] = problem
    for name, high in (("qty", MAX_QTY), ("amount", MAX_AMOUNT)):
        problem = _integer_problem(fields.get(name), 1, high)
        if problem:
            problems[name] = problem
    currency = fields.get("currency")
    # Asked for its type first: a list or an object cannot even be looked for in a set.
    if not isinstance(currency, str) or currency not in CURRENCIES:
        problems["currency"] = "must be an ISO 4217 code such as JPY"
    for name in sorted(fields.keys() - {"id", "sku", "qty", "amount", "currency"}, key=str):
        problems[str(name)[:MAX_ID_LENGTH]] = "is not a field of an order"
    if problems:
        raise InvalidInput(problems)
    return Order(**{name: fields[name] for name in ("id", "sku", "qty", "amount", "currency")})


def require_amount(amount: object, field: str = "amount") -> int:
    """`amount` itself; raises InvalidInput unless it is an integer from 1 to 10^12."""
    problem = _integer_problem(amount, 1, MAX_AMOUNT)
    if problem:
        raise InvalidInput({field: problem})
    assert isinstance(amount, int)
    return amount

"""The live run: new orders through the real pipeline to all receivers, watched in the database until each is done."""

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from contracts.counts import counted
from contracts.events import ORDER_PLACED
from contracts.identifiers import order_placed_id
from contracts.orders import Order
from intake import Intake
from labs.verdict import LabFailed, Verdict
from store.deliveries import DONE
from store.engine import Database
from store.progress import Progress, effects_of, progress_of, takers
from store.receivers import registered_receivers

PATIENCE = 60.0  # seconds, after which the run is bad
_EVERY = 0.05


def new_orders(count: int) -> list[Order]:
    """Orders with ids that no earlier run had: the time to the second, and chance for two runs in one second."""
    run = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    width = len(str(count))
    return [
        Order(f"demo-{run}-{number:0{width}}", f"sku-{number % 10}", 1, 100 * number, "JPY")
        for number in range(1, count + 1)
    ]


async def run(
    database: Database, intake: Intake, count: int, advanced: Callable[[int, int], None], patience: float = PATIENCE
) -> Verdict:
    """Place `count` orders and wait until every receiver took each of them. `advanced(done, all)` counts deliveries.

    Raises what intake raises (IntakePaused, StoreBusy), and LabFailed when nobody takes orders.
    """
    verdict = Verdict("live")
    orders = new_orders(count)
    ids = [order_placed_id(order.id) for order in orders]
    started = time.monotonic()
    placed = [await asyncio.to_thread(intake.place, order) for order in orders]
    verdict.require(all(each.created for each in placed), "the orders must be new, but some were there before")
    # One that found the pipeline cold wakes it; a failing wake is the look's business.
    await intake.wake_if_cold(next((each for each in placed if each.cold), placed[0]))

    receivers = await asyncio.to_thread(_takers, database)
    if not receivers:
        raise LabFailed("no receiver takes orders; a worker registers them when it starts")
    while True:
        progress = await asyncio.to_thread(_progress, database, ids)
        done = sum(progress.count(receiver, DONE) for receiver in receivers)
        advanced(done, count * len(receivers))
        if done == count * len(receivers):
            break
        if time.monotonic() - started > patience:
            verdict.require(False, f"after {patience:g} s {_missing(progress, receivers, count)}")
            break
        await asyncio.sleep(_EVERY)
    seconds = time.monotonic() - started
    if verdict.ok:
        await asyncio.to_thread(_check_effects, verdict, database, orders, ids)
    verdict.counts = {"orders": len(placed), "events": len(ids), "deliveries": done}
    verdict.reason = f"{counted(count, 'order')} reached {', '.join(receivers)} in {seconds:.1f} s"
    return verdict


def _takers(database: Database) -> list[str]:
    with database.read() as connection:
        return takers(connection, ORDER_PLACED)


def _progress(database: Database, ids: list[str]) -> Progress:
    with database.read() as connection:
        return progress_of(connection, ids)


def _missing(progress: Progress, receivers: list[str], count: int) -> str:
    parts = []
    if progress.unsent:
        parts.append(f"the relay has {counted(progress.unsent, 'event')} left")
    if progress.in_flight:
        parts.append(f"the fan-out has {counted(progress.in_flight, 'event')} left")
    for receiver in receivers:
        lacking = count - progress.count(receiver, DONE)
        others = {state: n for state, n in progress.deliveries.get(receiver, {}).items() if state != DONE}
        if lacking:
            states = ", ".join(f"{number} {state}" for state, number in sorted(others.items())) or "not registered"
            parts.append(f"{receiver} lacks {lacking} of {count} ({states})")
    return " and ".join(parts)


def _check_effects(verdict: Verdict, database: Database, orders: list[Order], ids: list[str]) -> None:
    """What the built-in receivers wrote: one row an order, and the same sum."""
    with database.read() as connection:
        effects = effects_of(connection, ids)
        known = registered_receivers(connection)
    total = sum(order.amount for order in orders)
    for receiver, (rows, amount) in effects.items():
        verdict.require(
            receiver not in known or (rows == len(orders) and amount in (None, total)),
            f"{receiver} must have written {counted(len(orders), 'row')} for {total}, but wrote {rows} for {amount}",
        )

"""What a person looks for in the Web UI during a recovery, read from its pages by a browser."""

import re
import socket
from pathlib import Path

import pytest

from contracts.names import REBUILD_ID, delivery_id, receiver_id
from tests.ui.browser import Browser
from tests.ui.conftest import FAILING, ORDERS, Shop
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

EVENTS = ORDERS + 1
HELD = (
    "rebuild: pausing intake",
    "rebuild-1: initial -> generation-1, intake paused",
    f"drained; {EVENTS} orders expected; replaying",
    f"{EVENTS} events replayed; reconciling",
    f"{EVENTS} events equal by id and amount; held until it is told to proceed",
)
ENDED = (
    "sealed; reading and reconciling again",
    f"certified: {EVENTS} events, digest",
    "generation-1 is active; initial is retired; intake stays paused until intake resume",
)


def tells_of_this_machine(shown: str) -> list[str]:
    """What no picture may show: paths and the host's name."""
    host = re.escape(socket.gethostname())
    return re.findall(rf"/(?:root|home|tmp|work|Users)/\S*|@{host}\b", shown)


def test_the_list_searched_by_receiver_shows_its_runs_and_no_others(shop: Shop, window: Browser) -> None:
    window.open(shop.links.query('Receiver="sales"'))
    window.wait_for("3 Workflows", receiver_id("sales"), delivery_id("sales", FAILING), REBUILD_ID)
    ids = window.run("return [...document.querySelectorAll('tbody tr a')].map(each => each.innerText.trim())")
    found = {text for text in ids if "/" in text}
    assert found == {receiver_id("sales"), delivery_id("sales", FAILING), REBUILD_ID}
    assert not {"relay", "fan-out"} & set(ids)


def test_the_failing_events_of_a_receiver_are_found_by_the_link_to_them(shop: Shop, window: Browser) -> None:
    window.open(shop.links.failing("sales"))
    assert "rebuild/sales" not in window.wait_for("1 Workflow", delivery_id("sales", FAILING))


def test_a_receiver_tells_what_it_does_and_what_it_waits_for(shop: Shop, window: Browser) -> None:
    window.open(shop.links.workflow(receiver_id("sales")))
    window.wait_for("RUNNING", "ReceiverWorkflow", "drain receiver/sales")
    window.click("User Metadata")
    window.wait_for(
        "deliveries to sales",
        "receiver/sales at rest since",
        f"{EVENTS} events in",
        f"as it came to rest, {FAILING} waits at sales since",
        "InjectedFault: sales is switched to fail",
    )


def test_a_rebuild_shows_its_phases_and_counts_to_the_end(shop: Shop, window: Browser, images: Path) -> None:
    run = shop.links.workflow(REBUILD_ID)
    window.open(run)
    window.wait_for("RUNNING", "replay • replay the history", "reconcile • reconcile", "held, a drill")
    window.click("User Metadata")
    assert ENDED[0] not in window.wait_for("rebuild of the sales totals", *HELD)

    shop.proceed()
    window.open(run)
    window.wait_for(
        "COMPLETED",
        "begin_rebuild • pause intake",
        "await_drained • wait until drained, fix the expected set",
        "seal • seal against writes",
        "certify • reconcile again, certify",
        "activate • activate",
    )
    window.click("User Metadata")
    assert not tells_of_this_machine(window.wait_for("rebuild of the sales totals", *HELD, *ENDED))
    window.picture(images / "rebuild.png")


def test_a_delivery_that_is_retried_shows_its_event_attempt_and_last_failure(
    shop: Shop, window: Browser, images: Path
) -> None:
    wait_until(lambda: shop.attempts() == 2, 60, "the second attempt")
    window.open(shop.links.workflow(delivery_id("sales", FAILING)))
    window.wait_for("RUNNING", f"attempt_delivery • {FAILING} to sales", f'"event_id": "{FAILING}"')
    window.click("User Metadata")
    window.wait_for(f"{FAILING} to sales: failed, is tried again")
    window.click("Pending Activities")
    shown = window.wait_for(
        delivery_id("sales", FAILING),
        "attempt_delivery",
        "Attempt 3 /",
        "Next Retry",
        "Last Worker Identity saisei-worker-",
        "attempt 2 of 5 failed: InjectedFault: sales is switched to fail (fault on)",
    )
    assert not tells_of_this_machine(shown)
    window.picture(images / "delivery.png")

"""With Redis and Temporal away orders are taken, and flow once both are there; one wake serves many orders."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.service import RPCError

import embedded
from contracts import search
from embedded.tied import tie
from tests.http.server import ROOT, Api, environment, order, running
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("flow") / "home"
    yield folder
    embedded.stop(folder)


def signals_to_the_relay(address: str) -> int:
    """How many wakes the relay's run has heard; 0 when there is none."""

    async def count() -> int:
        client = await Client.connect(address)
        try:
            history = await client.get_workflow_handle("relay").fetch_history()
        except RPCError:
            return 0
        kind = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED
        return sum(event.event_type == kind for event in history.events)

    return asyncio.run(count())


def checks(api: Api) -> dict[str, bool]:
    response = api.client.get("/readyz")
    assert response.status_code == 200
    return {name: check["ok"] for name, check in response.json()["checks"].items()}


def test_orders_taken_without_redis_and_temporal_flow_once_both_are_there(home: Path) -> None:
    with running(home) as api:
        assert checks(api) == {"database": True, "redis": False, "temporal": False}
        for number in range(1, 4):
            assert api.place(order(number)).status_code == 201
        stack = embedded.start(home, search_attributes={key.name: "Keyword" for key in search.ALL}, headless=True)
        with stack:
            assert stack.temporal_address is not None
            address = stack.temporal_address
            # The API finds the servers by itself, and sends the wake that is due.
            wait_until(lambda: all(checks(api).values()), 60, "all servers are reported as there")
            wait_until(lambda: signals_to_the_relay(address), 60, "the wake arrives")

            # No worker yet, so the pipeline stays cold for everyone.
            before = signals_to_the_relay(address)
            threads = [threading.Thread(target=api.place, args=[order(number)]) for number in range(4, 20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: signals_to_the_relay(address) > before, 60, "they are announced")

            log = (home / "worker.log").open("wb")
            worker = tie(
                subprocess.Popen([sys.executable, "worker.py"], cwd=ROOT, env=environment(home), stdout=log, stderr=log)
            )
            try:
                expected = {"JPY": {"orders": 19, "amount": 100 * sum(range(1, 20))}}
                wait_until(lambda: api.client.get("/sales").json()["totals"] == expected, 60, "the orders flow")
                # Sixteen cold orders at once: a wake for the first, one for those meanwhile, more on a slow machine.
                assert signals_to_the_relay(address) - before < 16
                status = api.client.get("/status").json()
                assert status["outbox"] == {"pending": 0, "in_flight": 0, "fanned_out": 19}
                wait_until(
                    lambda: {each["done"] for each in api.client.get("/status").json()["receivers"].values()} == {19},
                    60,
                    "each receiver is done",
                )
            finally:
                worker.terminate()
                worker.wait(60)
                log.close()
        # Both are away again, under a running API.
        assert api.place(order(20)).status_code == 201
        assert checks(api) == {"database": True, "redis": False, "temporal": False}
        assert api.stop() == 0

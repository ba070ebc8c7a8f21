"""One API for all tests that only ask; those that stop, break or pause one start their own."""

from collections.abc import Iterator

import pytest

from tests.http.server import Api, running
from tests.waiting import wait_until


@pytest.fixture(scope="package")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Without Redis and Temporal, and a database of its own. However slow the machine is, it takes orders when a test
    begins and does not call itself busy: by design "api ready" may come before a slow disk has the tables, and an order
    that waits for its turn for SAISEI_BUSY gets a 503."""
    patience = {"SAISEI_BUSY": "60", "SAISEI_HEARTBEAT": "130"}
    with running(tmp_path_factory.mktemp("api") / "home", **patience) as started:
        wait_until(lambda: started.client.get("/readyz").status_code == 200, 60, "the API takes orders")
        yield started

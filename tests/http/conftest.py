"""One API for all tests that only ask; those that stop, break or pause one start their own."""

from collections.abc import Iterator

import pytest

from tests.http.server import Api, running


@pytest.fixture(scope="package")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Without Redis and Temporal, and a database of its own."""
    with running(tmp_path_factory.mktemp("api") / "home") as started:
        yield started

"""A receiver that notes what it takes, and a pipeline that ends in it."""

from collections.abc import Iterator

import pytest

from store.engine import Database
from tests.activities.stages import Recorder, Stages, stages


@pytest.fixture
def receiver() -> Recorder:
    return Recorder()


@pytest.fixture
def scene(database: Database, redis_url: str, receiver: Recorder) -> Iterator[Stages]:
    with stages(database, redis_url, receiver, backoff=0.001) as scene:
        yield scene

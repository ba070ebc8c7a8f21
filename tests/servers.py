"""Real servers for the tests: one Temporal and one Valkey a session, and for each test a namespace of its own."""

from collections.abc import Iterator
from itertools import count

import pytest
import redis
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.testing import TimeSkipper, TimeSkippingConfig

from embedded import TemporalServer, ValkeyServer
from runs.search_attributes import register_search_attributes

_numbers = count(1)
# Each test has a namespace of its own, and would wait up to 2 s until runs may have our search attributes there.
_KNOWN_AT_ONCE = {"system.forceSearchAttributesCacheRefreshOnRead": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    """Skips time for workflows that are started through a TimeSkipper, and for no others."""
    server = TemporalServer(
        tmp_path_factory.mktemp("temporal"),
        headless=True,
        dynamic_config={"frontend.WorkflowTimeSkippingEnabled": True, **_KNOWN_AT_ONCE},
    )
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def short_history_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    """Suggests to continue as new after 40 events."""
    server = TemporalServer(
        tmp_path_factory.mktemp("temporal-short"),
        headless=True,
        dynamic_config={"limit.historyCount.suggestContinueAsNew": 40, **_KNOWN_AT_ONCE},
    )
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


@pytest.fixture
def redis_url(valkey_server: ValkeyServer) -> str:
    """An empty Redis."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url


async def fresh_namespace(server: TemporalServer) -> Client:
    """A client of a namespace where nothing runs and nobody polls; it knows our search attributes."""
    client = await register_namespace(server, f"test-{next(_numbers)}")
    await register_search_attributes(client)
    return client


async def register_namespace(server: TemporalServer, name: str) -> Client:
    """A client of a new namespace."""
    client = await Client.connect(server.address)
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(namespace=name, workflow_execution_retention_period=Duration(seconds=86_400))
    )
    return await Client.connect(server.address, namespace=name)


@pytest.fixture
async def client(anyio_backend: str, temporal_server: TemporalServer) -> Client:
    return await fresh_namespace(temporal_server)


@pytest.fixture
async def short_client(anyio_backend: str, short_history_server: TemporalServer) -> Client:
    return await fresh_namespace(short_history_server)


@pytest.fixture
def skipper(client: Client) -> TimeSkipper:
    """What is started through `skipper.client` has a clock of its own that skips whatever waits."""
    # The server's own bound of 200 skips is for runs that spin.
    return TimeSkipper(client, config=TimeSkippingConfig(max_session_skip_count=1000))

"""Registering our search attributes with a server that reads its namespaces every 2 s."""

import asyncio
from collections.abc import Iterator

import pytest
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError, RPCStatusCode

from contracts import search
from embedded import TemporalServer
from runs import search_attributes
from runs.search_attributes import register_search_attributes
from tests.servers import register_namespace

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    server = TemporalServer(tmp_path_factory.mktemp("temporal-cached"), headless=True)
    server.start()
    server.wait_ready(60)
    yield server
    server.kill()


async def test_a_run_may_have_them_at_once(server: TemporalServer) -> None:
    client = await register_namespace(server, "new")
    values = TypedSearchAttributes([SearchAttributePair(key, "x") for key in search.ALL])

    async def start(workflow_id: str) -> None:
        await client.start_workflow("any", id=workflow_id, task_queue="nobody's", search_attributes=values)

    with pytest.raises(RPCError, match="no mapping defined"):
        await start("before")
    await asyncio.gather(*(register_search_attributes(client) for _ in range(4)))
    await start("after")


async def test_one_that_never_can_be_used_is_an_error(server: TemporalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await Client.connect(server.address)
    monkeypatch.setattr(search_attributes, "_ANY", "NoSuchAttribute = '-'")
    monkeypatch.setattr(search_attributes, "_LONGEST_WAIT", 0.2)
    with pytest.raises(RPCError, match="NoSuchAttribute") as raised:
        await register_search_attributes(client)
    assert raised.value.status is RPCStatusCode.INVALID_ARGUMENT

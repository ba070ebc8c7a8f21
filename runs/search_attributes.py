"""Registering our search attributes with a server; start-dev gets them as flags, any other server by this."""

import asyncio
import time

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import GetSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts import search

_LONGEST_WAIT = 30.0  # seconds; a server reads its namespaces anew every 2 s unless its administrator says otherwise
_EVERY = 0.05
_ANY = " AND ".join(f"{key.name} = '-'" for key in search.ALL)
_NOT_OURS_TO_ADD = (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED, RPCStatusCode.UNAUTHENTICATED)


async def missing_search_attributes(client: Client) -> list[str]:
    """Names of ours that the namespace does not know yet. Raises RPCError."""
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return [key.name for key in search.ALL if key.name not in known.custom_attributes]


async def register_search_attributes(client: Client) -> None:
    """Make the namespace know them, and wait until a run may have them; changes nothing the second time.

    A server may leave this to its administrator (Temporal Cloud does): then it is enough that they are there. Raises
    RPCError otherwise, also where they cannot be used within 30 s.
    """
    await _add(client)
    until = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            await client.count_workflows(_ANY)
            return
        except RPCError as error:
            # It answered that it knows them, by the database, and refuses a start with them by what it read before.
            if error.status is not RPCStatusCode.INVALID_ARGUMENT or time.monotonic() > until:
                raise
        await asyncio.sleep(_EVERY)


async def _add(client: Client) -> None:
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=client.namespace,
                search_attributes={key.name: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD for key in search.ALL},
            )
        )
    except RPCError as error:
        if error.status is RPCStatusCode.ALREADY_EXISTS or "already exist" in str(error):
            return
        if error.status in _NOT_OURS_TO_ADD and await _are_known(client):
            return
        raise


async def _are_known(client: Client) -> bool:
    listed = await client.workflow_service.get_search_attributes(GetSearchAttributesRequest())
    return {key.name for key in search.ALL} <= set(listed.keys)

"""Registering our search attributes with a server; start-dev gets them as flags, any other server by this."""

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts import search


async def missing_search_attributes(client: Client) -> list[str]:
    """Names of ours that the namespace does not know yet. Raises RPCError."""
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return [key.name for key in search.ALL if key.name not in known.custom_attributes]


async def register_search_attributes(client: Client) -> None:
    """Make the namespace know them; changes nothing the second time. Raises RPCError when the server refuses."""
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=client.namespace,
                search_attributes={key.name: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD for key in search.ALL},
            )
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS and "already exist" not in str(error):
            raise

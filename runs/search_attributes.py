"""Registering our search attributes with a server; start-dev gets them as flags, any other server by this."""

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts import search


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

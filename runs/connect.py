"""Connecting to Temporal: its own environment or profile where one is set, the embedded server otherwise."""

import asyncio

from temporalio.client import Client
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError

from contracts.errors import Unreachable

_PATIENCE = 5.0  # seconds


def configured_address() -> str | None:
    """The address that the environment or profile names, or None."""
    return ClientConfig.load_client_connect_config().get("target_host")


async def connect(address: str | None = None) -> Client:
    """A client for the configured Temporal, else for `address` (`host:port`).

    Raises Unreachable, in one sentence, when it does not answer within 5 seconds.
    """
    config = ClientConfig.load_client_connect_config()
    target = config.get("target_host") or address
    if target is None:
        raise Unreachable("no Temporal server is running here; start one with `make up`, or set TEMPORAL_ADDRESS")
    config["target_host"] = target
    try:
        async with asyncio.timeout(_PATIENCE):
            return await Client.connect(**config)
    except (RuntimeError, OSError, TimeoutError, RPCError) as error:
        raise Unreachable(
            f"Temporal at {target} does not answer; start it with `make up`, or correct TEMPORAL_ADDRESS"
        ) from error

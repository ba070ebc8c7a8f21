"""Connecting to Temporal: its own environment or profile where one is set, the embedded server otherwise."""

import asyncio
import dataclasses
import os

from temporalio.api.failure.v1 import Failure
from temporalio.client import Client
from temporalio.converter import DataConverter, DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError

from contracts.errors import Unreachable, WrongSettings
from runs.profile import configured

_PATIENCE = 5.0  # seconds


class FailureConverter(DefaultFailureConverter):
    """As the SDK's own, but an expected failure has no stack: it would name the SDK's lines and this one's, and hide
    the message in the Web UI."""

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure) -> None:
        expected = isinstance(exception, ApplicationError) and exception.category == ApplicationErrorCategory.BENIGN
        # Writing the stack down takes milliseconds, so it is not left out only afterwards.
        stack = exception.__traceback__
        try:
            super().to_failure(exception.with_traceback(None) if expected else exception, payload_converter, failure)
        finally:
            exception.__traceback__ = stack


_CONVERTER = dataclasses.replace(DataConverter.default, failure_converter_class=FailureConverter)


async def connect(address: str | None = None, role: str = "starter") -> Client:
    """A client for the configured Temporal, else for `address` (`host:port`). `role` is who the Web UI says it is.

    Raises Unreachable, in one sentence, when it does not answer within 5 seconds, and WrongSettings when its address is
    none.
    """
    config = configured()
    target = config.get("target_host") or address
    if target is None:
        raise Unreachable("no Temporal server is running here; start one with `make up`, or set TEMPORAL_ADDRESS")
    config["target_host"] = target
    try:
        async with asyncio.timeout(_PATIENCE):
            # The default would be the process and the host; the host stands on the page of the workers.
            identity = f"saisei-{role}-{os.getpid()}"
            return await Client.connect(**config, identity=identity, data_converter=_CONVERTER)
    except ValueError as error:
        raise WrongSettings({"TEMPORAL_ADDRESS": f"{target} is not host:port ({error})"}) from error
    except (RuntimeError, OSError, TimeoutError, RPCError) as error:
        raise Unreachable(
            f"Temporal at {target} does not answer; "
            "start it, or correct or unset TEMPORAL_ADDRESS (`make up` starts one then)"
        ) from error

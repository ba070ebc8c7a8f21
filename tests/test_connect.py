"""What Temporal is told of failures."""

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultPayloadConverter
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from runs.connect import FailureConverter


def told(error: Exception) -> Failure:
    failure = Failure()
    try:
        raise error
    except Exception as raised:
        FailureConverter().to_failure(raised, DefaultPayloadConverter(), failure)
    return failure


def test_an_expected_failure_has_its_message_and_no_stack() -> None:
    failure = told(ApplicationError("full", type="ReceiverFailed", category=ApplicationErrorCategory.BENIGN))
    assert (failure.message, failure.application_failure_info.type) == ("full", "ReceiverFailed")
    assert failure.stack_trace == ""


def test_any_other_failure_has_its_stack() -> None:
    assert "test_connect.py" in told(ApplicationError("odd")).stack_trace
    assert "test_connect.py" in told(ValueError("a bug")).stack_trace

"""Typed search attributes: what a person looks for in the Web UI."""

from temporalio.common import SearchAttributeKey

RECEIVER = SearchAttributeKey.for_keyword("Receiver")
AGGREGATE_ID = SearchAttributeKey.for_keyword("AggregateId")
JOB = SearchAttributeKey.for_keyword("Job")

ALL = (RECEIVER, AGGREGATE_ID, JOB)

# As `temporal server start-dev --search-attribute NAME=TYPE` takes them.
START_DEV = {key.name: "Keyword" for key in ALL}

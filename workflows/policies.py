"""Time-outs and retry policies by name. Activities that wait for our own servers are retried until these are back."""

from datetime import timedelta

from temporalio.common import RetryPolicy

# A drain fails when Redis, the database or its receiver is away: tried again soon, and for ever.
DRAIN_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=5),
)

# Without a beat for this long a worker is dead, and another one takes its activity over. All activities but drains beat
# once a second (activities/beating.py), whatever they wait for.
ALIVE = timedelta(seconds=5)

# One database transaction; the time-out covers the wait for the write lock under load.
DATABASE_TIMEOUT = timedelta(seconds=30)
DATABASE_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=30),
)

# The activity itself says when the next attempt is due (next_retry_delay) and ends the series; this is for
# what fails on the way.
DELIVERY_RETRY = DATABASE_RETRY

ONCE = RetryPolicy(maximum_attempts=1)

# A local activity keeps its run's decision open meanwhile; what takes longer is left to activities of its own.
AT_ONCE_TIMEOUT = timedelta(seconds=10)

# A request to a provider outside may take its time.
STEP_TIMEOUT = timedelta(minutes=2)

# Up to an hour apart, for 7 days (SHIP_PERIOD bounds the series, not a count).
SHIP_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(hours=1),
)
SHIP_PERIOD = timedelta(days=7)

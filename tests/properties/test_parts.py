"""The parts that decide how much and how often, for whatever they observe."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.failure import RetryPolicy
from pipeline.stage import BatchSize
from tests.pipeline.test_pieces import pieces_tried

seconds = st.floats(0, 10)
left = st.one_of(st.just(0), st.integers(0, 2000))  # read and not reached: some of the batch failed


@given(first=st.integers(50, 2000), seen=st.lists(st.tuples(st.integers(0, 3000), seconds, left), max_size=30))
def test_a_batch_goes_half_the_way_to_what_fits_into_16_ms_and_stays_in_bounds(
    first: int, seen: list[tuple[int, float, int]]
) -> None:
    size = BatchSize(first)
    for events, took, rest in seen:
        before = size.value
        size.observe(events, took, left=rest)
        assert 50 <= size.value <= 2000
        if events < before and took <= 0.016 and not rest:
            assert size.value == before  # it was not full, and says nothing about full ones
            continue
        fitting = min(max(events * 0.016 / max(took, 0.0001), 50), 2000)
        low, high = sorted((before, fitting))
        assert low - 1 <= size.value <= high
        if high - low > 2:
            assert size.value != before


@given(cost=st.floats(0.000_001, 0.001))
def test_a_batch_settles_at_what_fits_into_16_ms(cost: float) -> None:
    size = BatchSize()
    for _ in range(40):
        size.observe(size.value, size.value * cost)
    assert size.value * cost <= 0.016 * 1.001 or size.value == 50
    assert size.value * cost >= 0.016 / 1.5 or size.value == 2000


@given(attempts=st.integers(1, 50), backoff=st.floats(0.001, 100), now=st.integers(0, 2**42))
def test_a_failing_event_waits_longer_each_time_and_not_for_ever(attempts: int, backoff: float, now: int) -> None:
    policy = RetryPolicy(attempts, backoff)
    waits = []
    for tried in range(1, attempts):
        due = policy.next_attempt_at(tried, now)
        assert due is not None
        waits.append(due - now)
    assert policy.next_attempt_at(attempts, now) is None
    assert waits == sorted(waits)
    assert all(wait <= 3_600_000 for wait in waits)
    assert not waits or waits[0] == int(backoff * 1000)


@given(st.data())
def test_each_event_goes_well_or_fails_alone_once_in_order_wherever_the_receiver_stops(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    bad = data.draw(st.sets(st.integers(0, count - 1)))

    def stop(begin: int, end: int) -> int | None:
        return data.draw(st.none() | st.integers(0, end - begin - 1))

    settled = [event for begin, end in pieces_tried(count, bad, stop) for event in _settled(range(begin, end), bad)]
    assert settled == list(range(count))


def _settled(piece: range, bad: set[int]) -> range:
    return piece if len(piece) == 1 or bad.isdisjoint(piece) else range(0)

"""In which pieces events are tried: each once in order, and what fails is found in few attempts."""

from collections.abc import Callable
from math import log2

import pytest

from pipeline.pieces import Pieces

Stop = Callable[[int, int], int | None]  # begin and end of a piece that fails -> at which of its events it stopped


def by_halves(begin: int, end: int) -> None:
    """It does not tell where it stopped."""


def stops_at(bad: set[int]) -> Stop:
    return lambda begin, end: min(bad & set(range(begin, end))) - begin


def pieces_tried(count: int, bad: set[int], stop: Stop) -> list[tuple[int, int]]:
    """The pieces, as (begin, end), until all events went well or failed alone."""
    pieces, attempts, at = Pieces(count), [], 0
    while at < count:
        begin, end = at, min(at + pieces.size, count)
        assert begin < end
        attempts.append((begin, end))
        if bad.isdisjoint(range(begin, end)):
            pieces.went_well(end - begin)
            at = end
        elif end - begin > 1:
            pieces.failed(end - begin, stop(begin, end))
        else:
            pieces.failed_alone()
            at = end
    return attempts


def test_all_that_goes_well_is_tried_once() -> None:
    assert pieces_tried(2000, set(), by_halves) == [(0, 2000)]


def test_a_receiver_that_stops_at_what_it_fails_for_is_asked_four_times() -> None:
    bad = {700}
    assert pieces_tried(2000, bad, stops_at(bad)) == [(0, 2000), (0, 700), (700, 701), (701, 2000)]


def test_each_further_one_that_it_stops_at_costs_three_attempts() -> None:
    bad = set(range(50, 2000, 100))
    assert len(pieces_tried(2000, bad, stops_at(bad))) == 1 + 3 * len(bad)


@pytest.mark.parametrize("place", [0, 1, 700, 1998, 1999])
def test_one_that_fails_among_2000_is_found_by_halves(place: int) -> None:
    assert len(pieces_tried(2000, {place}, by_halves)) <= 2 + 2 * log2(2000)


def test_where_it_stopped_may_mislead_and_costs_two_attempts_each() -> None:
    bad = set(range(50, 2000, 100))
    most = len(pieces_tried(2000, bad, by_halves))
    for stop in (lambda begin, end: 0, lambda begin, end: end - begin - 1):
        assert len(pieces_tried(2000, bad, stop)) <= most + 2 * len(bad) + 2


def test_where_many_fail_pieces_are_short_at_once() -> None:
    bad = set(range(1, 2000, 3))
    assert len(pieces_tried(2000, bad, by_halves)) < 2.5 * 2000


def test_after_a_thicket_pieces_grow_again() -> None:
    assert len(pieces_tried(2000, set(range(50)), by_halves)) < 100

"""What a benchmark says."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure. `floor` is what the same run measured without what is judged, `ratio` = value / floor; `goal` in
    words, and whether it is met. None where there is none."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    goal: str | None = None
    ok: bool | None = None


def row(
    name: str,
    value: float,
    unit: str,
    *,
    floor: float | None = None,
    least: float | None = None,
    most: float | None = None,
    by: str = "value",
) -> Row:
    """A row whose goal is `by` (`value` or `ratio`) >= `least` or <= `most`."""
    ratio = value / floor if floor else None
    judged = value if by == "value" else ratio
    bound, sign = (least, ">=") if least is not None else (most, "<=")
    if bound is None:
        return Row(name, value, unit, floor, ratio)
    ok = None if judged is None else judged >= bound if least is not None else judged <= bound
    return Row(name, value, unit, floor, ratio, f"{by} {sign} {bound:g}", ok)


def median(values: Sequence[float]) -> float:
    """The middle one of interleaved runs: what a shared machine does to one of them does not decide."""
    return statistics.median(values)


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]

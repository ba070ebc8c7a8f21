"""The store's clock. Callers pass times in, so that tests and workflows decide what time it is."""

import time
from datetime import UTC, datetime


def now_ms() -> int:
    """UTC milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def seconds_until(moment: int) -> float:
    """From now until `moment` (UTC ms); 0 when that is over."""
    return max(0, moment - now_ms()) / 1000


def iso(milliseconds: int | None) -> str | None:
    """For people and JSON: `2026-11-29T18:30:00.123Z`."""
    if milliseconds is None:
        return None
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

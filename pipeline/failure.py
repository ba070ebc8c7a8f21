"""What a failed attempt means: whose fault it was, what a person reads, and when the next attempt is due."""

from dataclasses import dataclass

from receivers.base import ReceiverUnavailable
from store.dialect import is_foreign_outage

_LONGEST_ERROR = 500
_LONGEST_BACKOFF = 3600.0


@dataclass(frozen=True)
class RetryPolicy:
    """`attempts` in all, the first included; `backoff` seconds after the first, doubling, an hour at most."""

    attempts: int
    backoff: float

    def next_attempt_at(self, attempts: int, now: int) -> int | None:
        """When (UTC ms) to try again after `attempts` failures, or None when that was the last one."""
        if attempts >= self.attempts:
            return None
        return now + int(self.delay(attempts) * 1000)

    def delay(self, attempts: int) -> float:
        """Seconds to wait after `attempts` failures."""
        return min(self.backoff * 2.0 ** min(attempts - 1, 60), _LONGEST_BACKOFF)


def is_unavailable(error: BaseException) -> bool:
    """Whether the receiver's other side is down, rather than the event bad."""
    return isinstance(error, ReceiverUnavailable | ConnectionError | TimeoutError) or is_foreign_outage(error)


def describe(error: BaseException) -> str:
    """One line for listings: the kind of error and its text, at most 500 characters, storable as text anywhere."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # also how it is written is the receiver's, and that would stop all that it takes
        text = "its text cannot be had"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line.replace("\0", "").encode(errors="replace").decode()[:_LONGEST_ERROR]

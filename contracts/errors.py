"""Every error that Saisei raises on purpose, each with a one-sentence message for a person.

SaiseiError
├── InvalidInput          bad field of an order, a job or a command; `.fields` names each
│   └── WrongSettings     an environment variable, a profile or the registry is unusable
├── Conflict              the same business id, other content
├── NotFound              no such order, event, job or receiver
├── Refused               not now: intake paused, an event that waits behind another one, ...
│   └── IntakePaused
├── StoreBusy             our own database could not be locked in time; never an event's fault
├── TransactionLost       our own database took a transaction back by itself; never an event's fault
│   └── TransactionEnded  a receiver ended the transaction that it was given
└── Unreachable           a server that is configured does not answer

The class names double as `type` of the Temporal `ApplicationError`s that carry them.
"""

from collections.abc import Mapping, Sequence


class SaiseiError(Exception):
    """Base of all; its text is one sentence: what is wrong and what to do."""


class InvalidInput(SaiseiError):
    """One or more fields are unusable.

    `fields` maps each field name to what is wrong with it.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = dict(fields)
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in self.fields.items()))


class WrongSettings(InvalidInput):
    """What the process was told from outside is unusable; `fields` names each variable or file.

    Nothing but another setting helps, so programs end with the exit code of wrong usage.
    """


class Conflict(SaiseiError):
    """The same business id names something else already."""


class NotFound(SaiseiError):
    """What was asked for does not exist."""


class Refused(SaiseiError):
    """The request is well-formed, and the present state does not allow it."""


class IntakePaused(Refused):
    """Intake takes no new orders until it is resumed."""

    def __init__(self, paused_by: str | None = None) -> None:
        self.paused_by = paused_by
        super().__init__("order intake paused")


class StoreBusy(SaiseiError):
    """Another process held the database's write lock for longer than we wait."""


class TransactionLost(SaiseiError):
    """Our own database took the transaction back by itself (disk full, I/O error); nothing of it is kept."""

    def __init__(self, why: str = "the database took the transaction back by itself; see whether its disk is full"):
        super().__init__(why)


class TransactionEnded(TransactionLost):
    """`receiver` ended the transaction while it had it for the events at `positions`: by the driver's own connection,
    since it has no other way. Whoever else had a part in the transaction has lost it too."""

    def __init__(self, receiver: str, positions: Sequence[int]) -> None:
        self.receiver = receiver
        self.positions = list(positions)
        super().__init__(
            f"receiver {receiver} ended the transaction that it was given, through the driver's own connection; "
            "it must leave that to Saisei"
        )


class Unreachable(SaiseiError):
    """A server that is configured does not answer."""

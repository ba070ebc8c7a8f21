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
└── Unreachable           a server that is configured does not answer

The class names double as `type` of the Temporal `ApplicationError`s that carry them.
"""

from collections.abc import Mapping


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

    def __init__(self) -> None:
        super().__init__("the database took the transaction back by itself; see whether its disk is full")


class Unreachable(SaiseiError):
    """A server that is configured does not answer."""

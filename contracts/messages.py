"""Inputs and results of workflows and activities: ids and counts only, so that histories stay small and hold
no personal data (mechanism 3). New fields get defaults: a recorded history must still decode.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timings:
    """Waits that a run carries with it, in seconds, so that replays see the ones it started with."""

    heartbeat_timeout: float = 12.0
    drain_timeout: float = 600.0
    safety_timer: float = 900.0


@dataclass(frozen=True)
class StageInput:
    """Input of the relay's and the fan-out's run. `drains` and `events` count over continue-as-new."""

    timings: Timings = field(default_factory=Timings)
    drains: int = 0
    events: int = 0


@dataclass(frozen=True)
class ReceiverInput:
    """Input of one receiver's run."""

    receiver: str
    timings: Timings = field(default_factory=Timings)
    drains: int = 0
    events: int = 0


@dataclass(frozen=True)
class DrainInput:
    """Which stage to drain: `relay`, `fan-out` or `receiver/{name}`. `held_since` (UTC ms): the hold of its receiver
    that the run knows of."""

    stage: str
    held_since: int | None = None


@dataclass(frozen=True)
class DrainReport:
    """What one drain did. `more`: it stopped for its time, the worker's shutdown or a hold other than the one that its
    run knows of, not for lack of work. `held_since` (UTC ms) and `reason` are set while the receiver is on hold;
    `waits` while it rests with events that are not settled: a sentence that names the oldest and what it waits for."""

    events: int
    batches: int
    more: bool
    held_since: int | None = None
    reason: str | None = None
    waits: str | None = None


@dataclass(frozen=True)
class DeliveryInput:
    """One event at one receiver.

    `manual`: one attempt taken by hand, whose failure leaves the state as it was; `fail` makes the receiver
    fail on purpose (a drill).
    """

    receiver: str
    event_id: str
    aggregate_id: str
    manual: bool = False
    fail: bool = False


@dataclass(frozen=True)
class DeliveryResult:
    """Where the delivery stands: its state, its attempts in all, its last error."""

    state: str
    attempts: int = 0
    error: str | None = None


@dataclass(frozen=True)
class FulfilmentInput:
    """A `charge` -> `ship` job. `ship_fails` makes shipping fail on purpose (a drill).

    `ship_attempts` 0 keeps the policy's own schedule (7 days); 1 is a single attempt.
    """

    job_id: str
    amount: int
    ship_fails: bool = False
    ship_attempts: int = 0


@dataclass(frozen=True)
class StepInput:
    """One step of a job."""

    job_id: str
    amount: int
    fails: bool = False


@dataclass(frozen=True)
class FulfilmentResult:
    """Outcome of each step: `committed`/`already_completed` for charge, `completed` for ship, or `failed`."""

    charge: str
    ship: str


@dataclass(frozen=True)
class RedriveInput:
    """A redrive whose set is frozen in the database. `receiver`: the one it is for, where one was named."""

    request_id: str
    receiver: str | None = None


@dataclass(frozen=True)
class RedriveReport:
    """How far a redrive is: its state, and of `total` dead letters how many are pending again (`taken`) or were no
    dead letters any more (`skipped`)."""

    state: str
    total: int = 0
    taken: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class RebuildInput:
    """A rebuild, or a rollback to a retired generation (`target`, or the one that was active last).

    `resume`: open intake again once it is activated. `drain_bound`: seconds that the wait for a drained outbox may
    take; `phase_bound`: seconds for each later phase. `hold`: a drill; it stops once the new generation is found equal,
    before it is sealed, until the signal `proceed`.
    """

    kind: str = "rebuild"
    target: str | None = None
    resume: bool = False
    drain_bound: float = 600.0
    phase_bound: float = 3600.0
    hold: bool = False


@dataclass(frozen=True)
class RebuildStep:
    """Input of a rebuild's activity: which rebuild, and the bound of its wait in seconds where it waits."""

    rebuild_id: str
    bound: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class RebuildReport:
    """Where a rebuild stands: its ids, counts and outcome as its database row says."""

    rebuild_id: str
    kind: str
    state: str
    generation: str
    base_generation: str
    expected: int = 0
    replayed: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ReconcileReport:
    """How many events the generation holds, its digest, and the named differences (none: equal)."""

    count: int
    digest: str
    problems: list[str] = field(default_factory=list)

"""The whole schedule of an event that fails, as it is by default, on a server that skips the time in between: its row
says when the next attempt is due, and the server makes it then."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import Connection
from temporalio.testing import TimeSkipper

from activities.delivering import DeliveryActivities
from config import Settings
from contracts.events import Event
from contracts.messages import DeliveryInput, DeliveryResult
from pipeline.failure import RetryPolicy
from pipeline.hub import Hub
from pipeline.writer import Writer
from receivers.base import Receiver
from runs.starts import Runs
from store.clock import now_ms
from store.deliveries import DEAD, record_failure
from store.engine import Database
from tests.store.scenes import delivered_to, rows
from tests.workflows.workers import BUSY, Attempts, workers

pytestmark = pytest.mark.anyio

HOUR = 3600.0


@dataclass
class Never(Receiver):
    """Takes nothing, and notes what stood in the event's row when it was tried, and at what time."""

    clock: Attempts
    name = "never"
    event_types = frozenset({"thing-happened"})
    tried: list[tuple[int, int, int]] = field(default_factory=list)  # attempts before, due, now (UTC ms)

    def deliver(self, connection: Connection, event: Event) -> None:
        row = connection.exec_driver_sql("SELECT attempts, next_attempt_at FROM deliveries").one()
        self.tried.append((row[0], row[1], self.clock.clock("attempt_delivery")()))
        raise ValueError(f"no, the {row[0] + 1}. time")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    """The server's clock, which is the store's as well."""
    attempts = Attempts()
    monkeypatch.setattr("activities.delivering.now_ms", attempts.clock("attempt_delivery"))
    return attempts


@pytest.mark.parametrize(
    ("database_url", "policy", "delays"),
    [
        ("sqlite", RetryPolicy(Settings.attempts, Settings.backoff), [1.0, 2.0, 4.0, 8.0]),
        # Doubling ends at an hour; a day of it.
        ("postgresql", RetryPolicy(36, Settings.backoff), [*(2.0**n for n in range(12)), *[HOUR] * 23]),
    ],
    indirect=["database_url"],
    ids=["by default", "for a day"],
)
async def test_each_attempt_at_an_event_is_made_when_its_row_says(
    skipper: TimeSkipper, database: Database, clock: Attempts, policy: RetryPolicy, delays: list[float]
) -> None:
    [event] = delivered_to(database, "never", count=1)
    failed = now_ms()
    due = policy.next_attempt_at(1, failed)
    with database.write() as connection:  # as the batch does it
        record_failure(connection, "never", event.position, attempts=1, error="first", next_attempt_at=due, now=failed)
    writer = Writer(database)
    settled: list[str] = []

    async def note(receiver: str) -> None:
        settled.append(receiver)

    receiver = Never(clock)
    own = DeliveryActivities(writer, {"never": receiver}, Hub(), retry=policy, settled=note)
    async with workers(skipper.client, [own.attempt_delivery], interceptors=[clock]):
        result = await Runs(skipper.client, []).start_delivery(DeliveryInput("never", "a-1", "a"))
        assert DeliveryResult(**await result.result()) == DeliveryResult(
            DEAD, policy.attempts, f"ValueError: no, the {policy.attempts}. time"
        )
        begun = len(clock.begun)
        # Started again after its end it finds the event settled, and tries nothing.
        again = await Runs(skipper.client, []).start_delivery(DeliveryInput("never", "a-1", "a"))
        assert (await again.result())["state"] == DEAD
    writer.close()
    assert [before for before, _, _ in receiver.tried] == list(range(1, policy.attempts))
    # Never before it was due, and soon after.
    assert all(0 <= now - due < BUSY * 1000 for _, due, now in receiver.tried), receiver.tried
    times = [failed, *(now for _, _, now in receiver.tried)]
    pauses = [(later - earlier) / 1000 for earlier, later in itertools.pairwise(times)]
    assert all(least <= pause < least + BUSY for pause, least in zip(pauses, delays, strict=True)), pauses
    assert begun <= len(delays) + 1, "no attempt is made in vain but the one that came before it was due"
    assert settled == ["never", "never"]
    assert rows(database, "SELECT status, attempts, next_attempt_at FROM deliveries") == [(DEAD, policy.attempts, None)]

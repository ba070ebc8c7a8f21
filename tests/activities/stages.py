"""The pipeline's stages over a real database and a real Redis, stepped by hand: no Temporal, no waiting."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from contracts.events import ORDER_PLACED, Event
from contracts.messages import DeliveryInput
from pipeline import event_list
from pipeline.event_list import EventList
from pipeline.failure import RetryPolicy
from pipeline.fan_out import FanOutStage
from pipeline.hub import Hub
from pipeline.receiving import ReceiverStage
from pipeline.relay import RelayStage
from pipeline.retries import Retries
from pipeline.stage import Stage
from pipeline.writer import Writer
from receivers.base import Receiver
from receivers.builtin import Billing, Mail, Sales
from store.engine import Database
from store.receivers import Hold, register_receiver
from tests.store.scenes import rows, scalar


class Recorder(Receiver):
    """Notes what it takes, in `mail_messages` and in `calls`; raises what `errors` has for an event id."""

    name = "recorder"
    event_types = frozenset({ORDER_PLACED, "thing-happened"})

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.after: Callable[[Connection], None] | None = None

    def deliver(self, connection: Connection, event: Event) -> None:
        self.calls.append(event.event_id)
        connection.exec_driver_sql(
            "INSERT INTO mail_messages (position, order_id, subject) "
            f"VALUES ({event.position}, '{event.aggregate_id}', '{event.event_id}')"
        )
        if self.after is not None:
            self.after(connection)
        if event.event_id in self.errors:
            raise self.errors[event.event_id]


class Scripted:
    """Moves what the test gives it, then nothing."""

    name = "scripted"
    fed_by: str | None = None
    watch: Callable[[], bool] | None = None
    more = True
    hold: Hold | None = None
    waits: str | None = None

    def __init__(self, *moves: int, rest: bool = True) -> None:
        self.moves = list(moves)
        self.rest = rest
        self.asked: list[float] = []
        self.begun = self.steps = 0

    async def begin(self) -> None:
        self.begun += 1

    async def sees_work(self) -> bool:
        return True

    async def step(self) -> int:
        self.steps += 1
        return self.moves.pop(0) if self.moves else 0

    async def may_rest(self, idle: float) -> bool:
        self.asked.append(idle)
        return self.rest


class Stages:
    """Relay, fan-out and receivers of one worker."""

    def __init__(
        self,
        database: Database,
        redis_url: str,
        receivers: Sequence[Receiver] = (Billing(), Mail(), Sales()),
        *,
        attempts: int = 5,
        backoff: float = 1.0,
    ) -> None:
        self.database = database
        self.writer = Writer(database)
        self.hub = Hub()
        self.client = event_list.connect(redis_url)
        self.events = EventList(self.client)
        self.started: list[DeliveryInput] = []
        self.retry = RetryPolicy(attempts, backoff)
        self.retries = Retries(self.writer, self._start_run, run_grace=12)
        self.relay = RelayStage(self.writer, self.events, self.hub, lease=15)
        self.fan_out = FanOutStage(self.writer, self.events, self.hub, [])
        self.receivers = {
            receiver.name: ReceiverStage(receiver, self.writer, retry=self.retry) for receiver in receivers
        }
        with database.write() as connection:
            for receiver in receivers:
                register_receiver(connection, receiver.name, receiver.event_types)

    async def _start_run(self, run: DeliveryInput) -> None:
        self.started.append(run)

    async def drain(self, *stages: Stage) -> None:
        """Step these (all, in the order of the flow, if not said) until nothing moves."""
        for stage in stages or (self.relay, self.fan_out, *self.receivers.values()):
            while await stage.step():
                pass

    def states(self, receiver: str = "recorder") -> dict[str, str]:
        """Event id -> state of the delivery."""
        return dict(
            rows(
                self.database,
                "SELECT event_id, d.status FROM deliveries d JOIN outbox o ON o.position = d.position "
                f"WHERE receiver = '{receiver}' ORDER BY d.position",
            )  # type: ignore[arg-type]
        )

    def counts(self, receiver: str = "recorder") -> Counter[str]:
        """State -> how many deliveries."""
        return Counter(self.states(receiver).values())

    def effects(self) -> list[str]:
        """What the Recorder wrote, in the order of the events' positions."""
        return [row[0] for row in rows(self.database, "SELECT subject FROM mail_messages ORDER BY position")]

    def scalar(self, statement: str) -> Any:
        return scalar(self.database, statement)

    def close(self) -> None:
        self.writer.close()
        self.events.close()


@contextmanager
def stages(database: Database, redis_url: str, *receivers: Receiver, **options: Any) -> Iterator[Stages]:
    scene = Stages(database, redis_url, *([receivers] if receivers else []), **options)
    try:
        yield scene
    finally:
        scene.close()

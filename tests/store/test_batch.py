"""A batch of events: a sequence that tells where whoever goes through it stopped."""

from itertools import islice

from store.deliveries import next_batch
from store.engine import Database
from tests.store.scenes import delivered_to


def test_it_stands_at_the_event_that_an_iteration_stopped_at(database: Database) -> None:
    delivered_to(database, "one", count=4)
    with database.read() as connection:
        events = next_batch(connection, "one", 10)
        assert events.stands_at is None
        for stopped, _ in enumerate(islice(events, 3)):
            assert events.stands_at == stopped
        assert events.stands_at == 2
        later = events[2:]
        assert later.stands_at is None
        assert [event.event_id for event in later] == ["a-3", "a-4"]
        assert (events.stands_at, later.stands_at) == (2, None)
        assert len(list(events)) == 4
        assert events.stands_at is None  # it went through to the end

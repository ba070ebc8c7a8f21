"""The Redis list: removal by value off the head, junk that blocks nobody, and no silent re-send of a push."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis

from contracts.errors import InvalidInput, Unreachable
from contracts.names import OUTBOX_LIST, PROCESSED_HASH, PROCESSED_PREVIOUS
from pipeline import event_list
from pipeline.event_list import EventList
from store.engine import Database
from tests.activities.stages import Recorder, stages
from tests.store.scenes import append, rows

A, B, C, D = b"a", b"b", b"c", b"d"


@pytest.fixture
def events(redis_url: str) -> Iterator[EventList]:
    events = EventList(event_list.connect(redis_url), processed_bound=3)
    yield events
    events.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_entries_leave_the_head_in_order(events: EventList) -> None:
    events.push(["a", "b", "c"])
    assert events.head(2) == [A, B]
    events.remove([A, B], ["a", "b"], "now")
    assert events.head(10) == [C]
    assert events.first() == C
    assert events.length() == 1


def test_a_twin_that_stalled_removes_nothing_of_what_came_after(events: EventList) -> None:
    events.push(["a", "b", "c", "d"])
    read = events.head(2)
    events.remove(read, ["a", "b"], "now")
    events.remove(read, ["a", "b"], "later")
    assert events.head(10) == [C, D]


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_a_twin_shifted_by_some_entries_removes_only_what_both_fanned_out(events: EventList, shift: int) -> None:
    events.push(list("abcdef"))
    first, second = events.head(4), events.head(shift)
    events.remove(second, [], "now")
    # The first one's entries are gone from the head in part; it takes the rest of its own and nothing more.
    events.remove(first, [], "now")
    left = events.head(10)
    assert left[-2:] == [b"e", b"f"]
    assert left == [b"e", b"f"]


def test_a_foreign_head_stays(events: EventList, raw: "redis.Redis") -> None:
    events.push(["a", "b"])
    read = events.head(2)
    raw.lpush(OUTBOX_LIST, "foreign")
    events.remove(read, [], "now")
    assert events.head(10) == [b"foreign", A, B]


def test_a_repeated_entry_leaves_as_often_as_it_was_read(events: EventList) -> None:
    events.push(["a", "a", "a"])
    events.remove([A, A], ["a"], "now")
    assert events.head(10) == [A]
    assert events.count("a") == 1


def test_processed_is_bounded_and_keeps_the_newest(events: EventList, raw: "redis.Redis") -> None:
    for number in range(10):
        events.push([f"e{number}"])
        events.remove([f"e{number}".encode()], [f"e{number}"], "now")
    assert events.processed_count() <= 3
    kept = set(raw.hkeys(PROCESSED_HASH)) | set(raw.hkeys(PROCESSED_PREVIOUS))
    assert b"e9" in kept
    assert len(kept) <= 8
    assert set(raw.keys()) <= {PROCESSED_HASH.encode(), PROCESSED_PREVIOUS.encode()}  # no other key, ever


def test_a_thousand_entries_and_more_leave_in_one_call(events: EventList) -> None:
    ids = [f"order-{number}:placed" for number in range(2000)]
    events.push(ids)
    events.remove([event_id.encode() for event_id in ids], ids, "now")
    assert events.length() == 0


def test_a_redis_that_is_away_gets_one_sentence() -> None:
    events = EventList(event_list.connect("redis://127.0.0.1:1/0"))
    with pytest.raises(Unreachable, match=r"Redis at 127\.0\.0\.1:1 does not answer"):
        events.ping()
    with pytest.raises(InvalidInput, match="REDIS_URL"):
        event_list.connect("nonsense")


@pytest.mark.anyio
async def test_junk_goes_to_invalid_entries_and_the_rest_flows(
    database: Database, redis_url: str, raw: "redis.Redis"
) -> None:
    with stages(database, redis_url, Recorder()) as scene:
        append(database, "a", 1, 2)
        raw.rpush(OUTBOX_LIST, b"\xff\xfe", b"", b"nul\0", b"no-such-event", "再生", b"x" * 100_000, b"{}")
        await scene.drain(scene.relay)
        raw.rpush(OUTBOX_LIST, b"no-such-event")
        await scene.drain()
        assert scene.effects() == ["a-1", "a-2"]
        assert scene.events.length() == 0
        found = dict(rows(database, "SELECT entry, reason FROM invalid_entries"))
        assert len(found) == 7
        assert found["no-such-event"] == found["再生"] == found["{}"] == "is no event in the outbox"
        assert found["\\xff\\xfe"] == "is not UTF-8 text"
        assert found["nul\\x00"] == "holds a NUL character"
        assert max(map(len, found)) <= 1000


@pytest.mark.anyio
async def test_a_key_of_a_wrong_type_loses_nothing(sqlite: Database, redis_url: str, raw: "redis.Redis") -> None:
    with stages(sqlite, redis_url, Recorder()) as scene:
        append(sqlite, "a", 1)
        raw.set(OUTBOX_LIST, "somebody's text")
        for stage in (scene.relay, scene.fan_out):
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                await stage.step()
        assert scene.scalar("SELECT status FROM outbox") == "PENDING"
        assert raw.get(OUTBOX_LIST) == b"somebody's text"  # not ours to delete
        raw.delete(OUTBOX_LIST)
        await scene.drain()
        assert scene.effects() == ["a-1"]


@pytest.mark.anyio
async def test_a_foreign_key_in_the_place_of_processed_stops_nothing(
    sqlite: Database, redis_url: str, raw: "redis.Redis"
) -> None:
    with stages(sqlite, redis_url, Recorder()) as scene:
        append(sqlite, "a", 1)
        raw.set(PROCESSED_HASH, "somebody's text")
        await scene.drain()
        assert scene.effects() == ["a-1"]
        assert raw.llen(OUTBOX_LIST) == 0
        assert raw.get(PROCESSED_HASH) == b"somebody's text"


class DroppingProxy:
    """Forwards to Redis and cuts the connection instead of the reply, `drop` times for an RPUSH."""

    def __init__(self, url: str, drop: int) -> None:
        target = urlsplit(url)
        self._target = (str(target.hostname), int(target.port or 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.left = drop

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            while request := client.recv(65536):
                server.sendall(request)
                reply = server.recv(65536)  # Redis has executed it
                if b"RPUSH" in request and self.left > 0:
                    self.left -= 1
                    return
                client.sendall(reply)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def dropping(url: str, drop: int) -> Iterator[DroppingProxy]:
    proxy = DroppingProxy(url, drop)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(5)


def test_a_lost_reply_leaves_one_push_and_an_error(redis_url: str, raw: "redis.Redis") -> None:
    with dropping(redis_url, 3) as proxy:
        events = EventList(event_list.connect(proxy.url))
        with pytest.raises(redis.ConnectionError):
            events.push(["a"])
        events.close()
    assert raw.lrange(OUTBOX_LIST, 0, -1) == [A]


def test_the_default_client_would_push_several_times(redis_url: str, raw: "redis.Redis") -> None:
    """The test above tests something: redis-py's own settings repeat the push and report success."""
    with dropping(redis_url, 3) as proxy, redis.Redis(port=int(urlsplit(proxy.url).port or 0)) as careless:
        careless.rpush(OUTBOX_LIST, "a")
    assert raw.lrange(OUTBOX_LIST, 0, -1) == [A] * 4


@pytest.mark.anyio
async def test_a_relay_whose_reply_was_lost_delivers_once(sqlite: Database, redis_url: str) -> None:
    with dropping(redis_url, 1) as proxy, stages(sqlite, proxy.url, Recorder()) as scene:
        append(sqlite, "a", 1, 2)
        with pytest.raises(redis.ConnectionError):
            await scene.relay.step()
        await scene.relay.step()
        assert scene.events.count("a-1") == 2
        await scene.drain()
        assert scene.effects() == ["a-1", "a-2"]

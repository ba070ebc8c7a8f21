"""The Redis list between relay and fan-out. It may vanish at any instant: the database knows what was in it.

An entry is an event id and nothing else. Keys: the list `outbox.events`; the hash `processed` (event id -> when it was
fanned out) and `processed.previous`, which keep the newest ids for people to look at. Nothing decides by the hash.
A server may answer and refuse every push: out of memory, a replica, a disk that fails. `require_pushes` asks for that.
"""

from collections.abc import Sequence
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from contracts.errors import Refused, Unreachable, WrongSettings
from contracts.names import NO_LIST, OUTBOX_LIST, PROCESSED_HASH, PROCESSED_PREVIOUS

# After this many ids `processed` becomes `processed.previous`, so the two hold at most twice as many.
PROCESSED_BOUND = 1_000_000

# Takes the entries that were read off the head again, and notes which ids were processed. Each entry is compared:
# whoever stalled after its commit finds another head and takes nothing but what it has fanned out itself. It never
# searches the list: a search for ids that a twin took already blocked the server for half a second. It reads the head
# once and cuts it once, and notes many ids at a time: a call of the server for each entry kept it, and the fan-out,
# three times as long. Nothing decides by the hashes: where a key of another type stands in their place (pcall), entries
# leave the list all the same. ARGV: when, the bound, for each entry 1 if it is to be noted and else 0, the entries.
_REMOVE = """
local first, at_once = 3, 1000
local count = #ARGV - first
local head = redis.call('LRANGE', KEYS[1], 0, count - 1)
local taken, noted, notes = 0, 0, {}
for i = 1, count do
  local entry = ARGV[first + i]
  if head[taken + 1] == entry then taken = taken + 1 end
  if string.sub(ARGV[first], i, i) == '1' then
    notes[noted + 1], notes[noted + 2] = entry, ARGV[1]
    noted = noted + 2
  end
  if noted > 0 and (noted >= at_once or i == count) then
    redis.pcall('HSET', KEYS[2], unpack(notes, 1, noted))
    noted = 0
  end
end
redis.call('LTRIM', KEYS[1], taken, -1)
local size = redis.pcall('HLEN', KEYS[2])
if type(size) == 'number' and size > tonumber(ARGV[2]) then redis.pcall('RENAME', KEYS[2], KEYS[3]) end
"""


def connect(url: str) -> "redis.Redis":
    """A client that tells of every failure at once.

    redis-py 8 repeats a command up to ten times when its reply is lost: one push would become many. Raises
    WrongSettings for a URL that is none.
    """
    try:
        return redis.Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=2,
            socket_timeout=5,  # a server that hangs must not outlast a heartbeat, or a worker's end
            health_check_interval=0,
        )
    except ValueError as error:
        raise WrongSettings({"REDIS_URL": str(error)}) from None


class EventList:
    """The list and the hash of one Redis server, through one client."""

    def __init__(self, client: "redis.Redis", processed_bound: int = PROCESSED_BOUND) -> None:
        self._client = client
        self._bound = processed_bound
        self._remove = client.register_script(_REMOVE)

    def ping(self) -> None:
        """Raises Unreachable, in one sentence, when the server does not answer."""
        try:
            self._client.ping()
        except redis.RedisError as error:
            raise Unreachable(
                f"Redis at {self._where()} does not answer ({error}); "
                "start it, or correct or unset REDIS_URL (`make up` starts one then)"
            ) from None

    def require_pushes(self) -> None:
        """Raises Refused, in one sentence, when the server takes no pushes. Nothing is written: it judges a push onto a
        list that there never is."""
        try:
            self._client.rpushx(NO_LIST, "")
        except redis.ResponseError as error:
            raise Refused(
                f"Redis at {self._where()} refuses pushes ({str(error).partition('. ')[0].rstrip('.')}); "
                "events wait in the database until it takes them"
            ) from None

    def _where(self) -> str:
        where = self._client.connection_pool.connection_kwargs
        return f"{where.get('host', where.get('path'))}:{where.get('port', '')}"

    def push(self, event_ids: Sequence[str]) -> None:
        """Append these, in order. When it raises, they may be in the list all the same."""
        self._client.rpush(OUTBOX_LIST, *event_ids)

    def head(self, limit: int) -> list[bytes]:
        """The first entries, at most `limit`; they stay in the list until `remove`."""
        return cast(list[bytes], self._client.lrange(OUTBOX_LIST, 0, limit - 1))

    def first(self) -> bytes | None:
        """The entry that is next, or None when the list is empty."""
        return cast("bytes | None", self._client.lindex(OUTBOX_LIST, 0))

    def remove(self, entries: Sequence[bytes], processed: Sequence[str], when: str) -> None:
        """Take `entries` off the head by value, and note those of them that are events, `processed`, at `when`, in one
        step.

        Called after the commit that fanned them out.
        """
        events = {event_id.encode() for event_id in processed}
        self._remove(
            keys=[OUTBOX_LIST, PROCESSED_HASH, PROCESSED_PREVIOUS],
            args=[when, self._bound, "".join("1" if entry in events else "0" for entry in entries), *entries],
        )

    def length(self) -> int:
        """How many entries wait."""
        return self._client.llen(OUTBOX_LIST)

    def processed_count(self) -> int:
        """How many event ids `processed` holds."""
        return self._client.hlen(PROCESSED_HASH)

    def count(self, event_id: str) -> int:
        """How often the event id is in the list."""
        return self._client.lrange(OUTBOX_LIST, 0, -1).count(event_id.encode())

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

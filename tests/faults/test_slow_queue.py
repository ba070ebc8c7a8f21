"""A queue that is slow is not a lost one: what waits in it for longer than a lost message may is not pushed again."""

from pathlib import Path

import pytest
import redis

from bench.stack import order_ids, record
from contracts import names
from store.clock import now_ms
from tests.faults.oracle import audited, drained
from tests.faults.rig import Rig
from tests.waiting import wait_until

_AGES = 600_000  # ms: far beyond the 2 s after which a message is taken for a lost one here


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_entry_of_a_slow_queue_is_pushed_twice(tmp_path: Path, count: int) -> None:
    with Rig(tmp_path) as rig, redis.Redis.from_url(rig.valkey.url) as client:
        record(rig.database, order_ids(count))
        published = now_ms() - _AGES
        waiting = [row[0] for row in rig.query("SELECT event_id FROM outbox ORDER BY position")]
        for first in range(0, count, 10_000):
            client.rpush(names.OUTBOX_LIST, *waiting[first : first + 10_000])
        with rig.database.write() as connection:
            connection.exec_driver_sql(
                "UPDATE outbox SET status = 'PUBLISHED', published_at = ?, first_published_at = ?",
                (published, published),
            )
        assert rig.run("recover-outbox")["recovered"] == 0
        client.config_resetstat()
        rig.start_worker(SAISEI_LOOK="0.1")
        took = drained(rig, 300)
        pushed = client.info("commandstats").get("cmdstat_rpush", {"calls": 0})["calls"]
        print(f"{count} entries waited, drained in {took:.1f} s, {pushed} pushes")
        assert pushed == 0
        assert rig.number("SELECT count(*) FROM outbox WHERE published_at <> :at", at=published) == 0
        # The last ones leave the list after the commit that made their deliveries.
        wait_until(lambda: client.llen(names.OUTBOX_LIST) == 0, 60, "the list is empty")
        audited(rig, by_command=True)

"""Redis or Temporal loses all that it has under a running pipeline: the database knows it all."""

import asyncio
from pathlib import Path

import redis
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import WorkflowExecutionStatus

from contracts import names, search
from contracts.messages import FulfilmentInput
from runs.starts import Runs
from store.clock import now_ms
from store.jobs import begin_job
from store.outbox import append_event
from tests.faults.oracle import Placer, audited, check, drained, effects
from tests.faults.receivers import HARD, JOURNALS, STUBBORN, table_of
from tests.faults.rig import Rig, seconds_until
from tests.waiting import wait_until


def test_what_redis_forgets_is_sent_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig, redis.Redis.from_url(rig.valkey.url) as client:
        rig.start_worker()
        placer = Placer(rig, "flush", 200)
        placer.start()
        for k in (100, 500, 1000):
            wait_until(lambda k=k: effects(rig) >= k, 60, f"effect {k}")
            client.flushall()
        placed = placer.finish()
        drained(rig)
        # Whether a flush hits an entry is a matter of milliseconds, so also one that must: the worker is dead, and
        # the entries are in the list.
        rig.kill("worker")
        later = Placer(rig, "later", 50, rate=1000)
        later.start()
        later.finish()
        rows = rig.query("SELECT event_id FROM outbox WHERE status = 'PENDING' ORDER BY position")
        assert len(rows) > 50
        client.rpush(names.OUTBOX_LIST, *[row[0] for row in rows])
        with rig.database.write() as connection:
            connection.exec_driver_sql(
                "UPDATE outbox SET status = 'PUBLISHED', published_at = ? WHERE status = 'PENDING'", (now_ms(),)
            )
        client.flushall()
        rig.start_worker()
        took = drained(rig)
        print(f"{len(rows)} events that Redis lost were there {took:.1f} s after the start")
        check(rig, [placed, later.placed])
        audited(rig, by_command=True)


def test_an_empty_temporal_is_filled_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker(SAISEI_BACKOFF="2", SAISEI_ATTEMPTS="20")
        with rig.database.write() as connection:
            connection.exec_driver_sql("INSERT INTO drill_switch VALUES (1)")
            append_event(
                connection, event_id="hard-1", aggregate_id="hard/hard-1", event_type=HARD, payload={"hard": True}
            )
            begin_job(connection, "job-1", 700, now_ms(), look_at=now_ms() + 60_000)

        async def before() -> None:
            runs = Runs(await rig.connect(), ())
            await runs.start_job(FulfilmentInput("job-1", 700, ship_fails=True))

        asyncio.run(before())
        charged = "SELECT count(*) FROM job_steps WHERE step = 'charge'"
        retrying = "SELECT count(*) FROM deliveries WHERE status = 'retrying' AND has_run = 1 AND attempts > 0"
        wait_until(lambda: rig.number(charged) == 1 and rig.number(retrying) == 1, 60, "a job and a failing event")

        placer = Placer(rig, "empty", 200)
        placer.start()
        wait_until(lambda: effects(rig) >= 300, 60, "effects")
        rig.empty_temporal()
        with rig.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM drill_switch")
        placed = placer.finish()

        async def there() -> bool:
            client = await rig.connect()
            stages = [names.RELAY_ID, names.FAN_OUT_ID, *(f"receiver/{name}" for name in (*JOURNALS, STUBBORN))]
            for stage in stages:
                if (await client.get_workflow_handle(stage).describe()).status != WorkflowExecutionStatus.RUNNING:
                    return False
            request = ListSearchAttributesRequest(namespace="default")
            known = (await client.operator_service.list_search_attributes(request)).custom_attributes
            return all(key.name in known for key in search.ALL)

        def all_there() -> bool:
            try:
                return asyncio.run(there())
            except Exception:
                return False

        singletons = seconds_until(all_there, 60, f"the singletons and the search attributes\n{rig.logs()}")
        done = "SELECT count(*) FROM jobs WHERE state = 'COMPLETED'"
        job = seconds_until(lambda: rig.number(done) == 1, 60, "the job is completed")
        rest = drained(rig)
        print(f"singletons {singletons:.1f} s, job {job:.1f} s, failing event {rest:.1f} s later")
        assert rig.number(f"SELECT count(*) FROM {table_of(STUBBORN)}") == 1
        assert [tuple(row) for row in rig.query("SELECT amount FROM charges")] == [(700,)]
        assert rig.number("SELECT count(*) FROM shipments") == 1
        # It failed before the drill began; what follows asks whether the others are blamed.
        with rig.database.write() as connection:
            connection.exec_driver_sql(
                "UPDATE deliveries SET attempts = 0, last_error = NULL WHERE receiver = ?", (STUBBORN,)
            )
        # The pipeline goes on as before: not through the look alone.
        after = Placer(rig, "after", 50)
        after.start()
        after.finish()
        drained(rig)
        check(rig, [placed, after.placed])
        audited(rig, by_command=True)

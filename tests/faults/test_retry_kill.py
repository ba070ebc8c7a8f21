"""kill -9 of the worker between a failure that is recorded, its claim, the start of its run, and the next attempt."""

from pathlib import Path

import pytest

from store.outbox import append_event
from tests.faults.oracle import audited, drained
from tests.faults.receivers import HARD, STUBBORN, table_of
from tests.faults.rig import Rig
from tests.waiting import wait_until

_LEFT = f"SELECT count(*) FROM deliveries WHERE receiver = '{STUBBORN}' AND status = 'retrying'"


@pytest.mark.parametrize("dies", ["recorded", "claimed", "started"])
def test_an_event_that_failed_is_tried_again_whenever_the_worker_dies(tmp_path: Path, dies: str) -> None:
    with Rig(tmp_path) as rig:
        with rig.database.write() as connection:
            connection.exec_driver_sql("INSERT INTO drill_switch VALUES (1)")
            append_event(
                connection, event_id="hard-1", aggregate_id="hard/hard-1", event_type=HARD, payload={"hard": True}
            )
        if dies == "recorded":
            worker = rig.start_worker(SAISEI_BACKOFF="600")  # not due while it lives
            wait_until(lambda: rig.number(f"{_LEFT} AND has_run = 0") == 1, 60, f"it failed\n{rig.logs()}")
            worker.kill()
            with rig.database.write() as connection:
                connection.exec_driver_sql("UPDATE deliveries SET next_attempt_at = 1 WHERE status = 'retrying'")
        else:
            worker = rig.start_worker(DRILL_DIES="before" if dies == "claimed" else "after")
            wait_until(lambda: worker.exit_code is not None, 60, f"it dies\n{rig.logs()}")
            assert rig.number(f"{_LEFT} AND has_run = 1 AND attempts = 1") == 1
        with rig.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM drill_switch")
        rig.start_worker()
        drained(rig)
        assert rig.number(f"SELECT count(*) FROM {table_of(STUBBORN)}") == 1
        assert rig.number(f"SELECT attempts FROM deliveries WHERE receiver = '{STUBBORN}'") == 1
        audited(rig)

"""A placing process killed at any instant leaves an order with its event, or neither (I1)."""

import random
import subprocess
import sys
import time
from pathlib import Path

from embedded.tied import tie
from store.clock import now_ms
from store.control import initialize
from store.engine import Database
from tests.faults.rig import ROOT
from tests.waiting import wait_until


def test_an_order_and_its_event_are_both_there_or_neither(tmp_path: Path, seed: int) -> None:
    database = Database(f"sqlite:///{tmp_path / 'saisei.db'}")
    with database.write() as connection:
        initialize(connection, now_ms())
    log = tmp_path / "placed.log"
    log.touch()
    command = [sys.executable, "-m", "tests.faults.placing", str(database.url), str(log)]
    placers = [tie(subprocess.Popen([*command, f"p{number}"], cwd=ROOT)) for number in range(2)]
    try:
        chance = random.Random(f"intake-{seed}")
        for number, placer in enumerate(placers):
            goal = chance.randint(1, 40)

            def placed(number: int = number, goal: int = goal, placer: "subprocess.Popen[bytes]" = placer) -> bool:
                assert placer.poll() is None, f"p{number} ended with {placer.returncode} (seed {seed})"
                return log.read_text().count(f"ok p{number}-") >= goal

            wait_until(placed, 60, f"p{number} places {goal} orders")
            # Anywhere within the next transaction, not always right after one.
            time.sleep(chance.random() * 0.004)
            placer.kill()
            placer.wait()
    finally:
        for placer in placers:
            placer.kill()
            placer.wait()
    invoked = {line.split()[1] for line in log.read_text().splitlines() if line.startswith("invoke ")}
    acknowledged = {line.split()[1] for line in log.read_text().splitlines() if line.startswith("ok ")}
    with database.read() as connection:
        orders = {row[0] for row in connection.exec_driver_sql("SELECT id FROM orders")}
        events = {row[0] for row in connection.exec_driver_sql("SELECT event_id FROM outbox")}
    with database.write():  # the lock died with its holder
        pass
    database.close()
    assert events == {f"{order}:placed" for order in orders}, f"seed {seed}"
    assert acknowledged <= orders <= invoked, f"seed {seed}"

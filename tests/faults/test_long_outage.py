"""A receiver that is down for a long time, and events that one receiver cannot take: nobody else notices, and in the
end the audit is clean."""

from pathlib import Path

import pytest

from tests.faults.oracle import audited, drained, record
from tests.faults.receivers import JOURNALS, PICKY, table_of
from tests.faults.rig import Rig, seconds_until

_SIZES = [400, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(400)])]


@pytest.mark.parametrize("count", _SIZES)
def test_a_receiver_that_is_down_holds_its_events_and_then_takes_them(tmp_path: Path, count: int) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        rig.run("fault", "on", "--receiver", "sales", "--mode", "outage")
        record(rig, "during", count)
        others = " UNION ALL ".join(
            f"SELECT count(*) AS n FROM {table}" for table in ("billing_entries", "mail_messages")
        )
        alone = seconds_until(lambda: rig.number(f"SELECT min(n) FROM ({others})") == count, 120, "the others are done")
        held = "SELECT count(*) FROM deliveries WHERE receiver = 'sales' AND status = 'pending' AND attempts = 0"
        seconds_until(lambda: rig.number(held) == count, 60, "all wait at the receiver that is down")
        holding = "SELECT count(*) FROM receivers WHERE receiver = 'sales' AND held_since IS NOT NULL"
        seconds_until(lambda: rig.number(holding) == 1, 60, "it is held")
        audited(rig, by_command=True)
        rig.run("fault", "off", "--receiver", "sales")
        took = drained(rig)
        print(f"{count} orders: the others {alone:.1f} s, the one that was down {took:.1f} s after it was back")
        assert [tuple(row) for row in rig.query("SELECT orders, amount FROM sales_totals")] == [
            (count, sum(100 + number for number in range(count)))
        ]
        assert rig.number("SELECT count(*) FROM deliveries WHERE status <> 'done' OR attempts > 0") == 0
        audited(rig, by_command=True)


@pytest.mark.parametrize("count", _SIZES)
def test_poison_dies_alone_and_is_redriven_or_waived(tmp_path: Path, count: int) -> None:
    poisoned = count // 100
    with Rig(tmp_path) as rig:
        rig.start_worker(DRILL_PICKY="1", SAISEI_ATTEMPTS="3", SAISEI_BACKOFF="0.2")
        with rig.database.write() as connection:
            connection.exec_driver_sql("INSERT INTO drill_switch VALUES (1)")
        record(rig, "order", count, poison=100)
        dead = f"SELECT count(*) FROM deliveries WHERE receiver = '{PICKY}' AND status = 'dead' AND attempts = 3"
        died = seconds_until(lambda: rig.number(dead) == poisoned, 240, f"{poisoned} dead letters\n{rig.logs()}")
        behind = f"SELECT count(*) FROM deliveries WHERE receiver = '{PICKY}' AND status = 'pending'"
        seconds_until(lambda: rig.number(behind) == poisoned, 60, "only what waits behind them is left")
        waiting = "SELECT count(*) FROM deliveries WHERE status NOT IN ('done', 'dead')"
        seconds_until(lambda: rig.number(waiting) == poisoned, 60, "the others are done")
        audited(rig, by_command=True)
        waived = [row[0] for row in rig.query("SELECT id FROM orders WHERE id LIKE '%poison' ORDER BY id LIMIT 2")]
        for order_id in waived:
            rig.run("dead", "waive", f"{order_id}:placed", "--receiver", PICKY, "--reason", "a drill")
        with rig.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM drill_switch")
        redrive = rig.run("dead", "redrive", "--receiver", PICKY, timeout=120)
        assert (redrive["state"], redrive["taken"]) == ("COMPLETED", poisoned - len(waived))
        took = drained(rig)
        print(f"{poisoned} of {count} dead after {died:.1f} s, done {took:.1f} s after the redrive")
        for name in (*JOURNALS, PICKY):
            seen: dict[str, list[int]] = {}
            for aggregate_id, seq in rig.query(f"SELECT aggregate_id, seq FROM {table_of(name)} ORDER BY n"):
                seen.setdefault(aggregate_id, []).append(seq)
            left_out = {f"order/{order_id}" for order_id in waived} if name == PICKY else set()
            assert len(seen) == count
            for aggregate_id, seqs in seen.items():
                assert seqs in ([[2]] if aggregate_id in left_out else [[1], [1, 2]]), (name, aggregate_id, seqs)
        audited(rig, by_command=True)

"""Orders come in while Temporal or Redis is away, and flow once it is back, with nobody's help."""

from pathlib import Path

import pytest

from tests.faults.oracle import PATIENT, Placer, check, drained, effects, unfinished
from tests.faults.rig import Rig
from tests.waiting import wait_until

ORDERS = 500


@pytest.mark.parametrize("away", ["temporal", "valkey"])
def test_orders_placed_during_an_outage_flow_after_it(tmp_path: Path, away: str) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        first = Placer(rig, "before", 20)
        first.start()
        first.finish()
        drained(rig)
        rested = "SELECT count(*) FROM control WHERE hot_until > 0"
        wait_until(lambda: rig.number(rested) == 0, 60, "the pipeline rests")
        before = effects(rig)
        rig.kill(away)
        placer = Placer(rig, "during", ORDERS, rate=250)
        placer.start()
        placed = placer.finish()
        assert unfinished(rig) > 0
        if away == "temporal":
            # At rest nobody but Temporal can start a drain, and the placing says so.
            assert effects(rig) == before
            assert placed.unheard == ORDERS
        assert placed.longest < PATIENT, "an order waits for an outage that is none of its business"
        rig.restart(away)
        took = drained(rig)
        print(
            f"{ORDERS} orders during an outage of {away}: drained {took:.1f} s after it, "
            f"longest placing {placed.longest * 1000:.0f} ms"
        )
        check(rig, [first.placed, placed])

"""Any history with failures, duplicates, redrives and rebuilds ends with live totals = rebuilt totals = a model."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import Shop
from tests.properties.world import World

# What the histories must have come by; those that came by none of it would prove little. Of a name's beginning.
MET = (
    "died",
    "recovered",
    "junk",
    "outage",
    "failed again",
    "settled: dead",
    "redriven",
    "waived",
    "rebuild COMPLETED",
    "cancelled",
)


def _histories(world: World, share: float, steps: int) -> Counter[str]:
    """`share` of the profile's examples, of so many steps each; what they came by."""
    world.met.clear()

    def shop() -> Shop:
        return Shop(world)

    with world.patched():
        run_state_machine_as_test(
            shop,
            settings=settings(
                max_examples=max(1, int(settings.default.max_examples * share)),
                stateful_step_count=steps,
                # A step is some transactions on a real database and a real list, and counts as the drawing of data.
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    return +world.met


@pytest.mark.timeout(1800)  # many examples, and very many of them in the long run
def test_any_history_on_sqlite(sqlite_world: World) -> None:
    met = _histories(sqlite_world, 0.25, 30)
    assert [name for name in MET if not any(each.startswith(name) for each in met)] == [], met


@pytest.mark.timeout(1800)
def test_any_history_on_postgresql(postgres_world: World) -> None:
    assert _histories(postgres_world, 0.04, 30)

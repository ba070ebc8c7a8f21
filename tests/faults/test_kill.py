"""kill -9 of the worker, of Valkey or of Temporal after the k-th effect, while orders come in at 100 a second."""

import random
from collections.abc import Iterator

import pytest

from tests.faults.oracle import Placement, Placer, check, drained, effects
from tests.faults.rig import Rig
from tests.waiting import wait_until

ORDERS = 120
_EFFECTS = ORDERS * 3 + (ORDERS + ORDERS // 3 * 3) * 2  # at the built-in receivers, and at the two journals


class Round:
    """One stack that is killed again and again; what was placed on it before stays right."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.placed: list[Placement] = []


@pytest.fixture(scope="module", params=["worker", "valkey", "temporal"])
def victim(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rounds(victim: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Round]:
    with Rig(tmp_path_factory.mktemp(victim)) as rig:
        rig.start_worker()
        yield Round(rig)


def test_every_order_has_one_effect_at_each_receiver_after_a_kill(rounds: Round, victim: str, seed: int) -> None:
    rig = rounds.rig
    k = random.Random(f"{victim}-{seed}").randint(1, _EFFECTS - 50)
    before = effects(rig)
    placer = Placer(rig, f"{victim}-{seed}", ORDERS)
    placer.start()
    wait_until(lambda: effects(rig) - before >= k, 60, f"effect {k} (seed {seed})")
    rig.kill(victim)
    rig.restart(victim)
    rounds.placed.append(placer.finish())
    took = drained(rig)
    print(f"kill of {victim} at effect {k} (seed {seed}): drained {took:.1f} s after the restart")
    check(rig, rounds.placed)

"""Workers that are stopped, come back as zombies, run side by side, or are asked to end."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import TimeoutType

from contracts.errors import StoreBusy
from contracts.names import RELAY_ID
from contracts.orders import Order
from intake import Intake
from store.engine import Database
from tests.faults.oracle import PATIENT, Placer, check, drained, effects
from tests.faults.rig import Rig, WorkerProcess
from tests.waiting import wait_until


def _stop_between_transactions(rig: Rig, worker: WorkerProcess) -> None:
    """SIGSTOP at an instant at which the worker neither holds nor awaits the write lock. One that does stops every
    other writer until it goes on, which is the next drill."""
    impatient = Database(str(rig.database.url), busy_timeout=0.3)
    try:
        for _ in range(200):
            worker.signal(signal.SIGSTOP)
            # The signal is only on its way: a thread that is just being given the lock stops after it has it.
            _, status = os.waitpid(worker.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), worker.output()[-3000:]
            try:
                with impatient.write():
                    return
            except StoreBusy:
                worker.signal(signal.SIGCONT)
                with rig.database.write():  # it goes on, by at least one transaction
                    pass
        raise AssertionError("the worker was never found between two transactions")
    finally:
        impatient.close()


def _rest(rig: Rig) -> None:
    """Wait until nothing is on its way and the relay has cleared its lease."""
    drained(rig)
    rested = "SELECT count(*) FROM control WHERE hot_until > 0"
    wait_until(lambda: rig.number(rested) == 0, 60, "the pipeline rests")


async def _waits_for_a_dead_worker(rig: Rig) -> list[float]:
    """By the server's clock, how long it waited each time that the relay's last worker did not take a decision."""
    history = await (await rig.connect()).get_workflow_handle(RELAY_ID).fetch_history()
    at = {event.event_id: event.event_time.ToDatetime() for event in history.events}
    not_taken = TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_START
    return [
        (at[event.event_id] - at[lost.scheduled_event_id]).total_seconds()
        for event in history.events
        if (lost := event.workflow_task_timed_out_event_attributes).timeout_type == not_taken
    ]


def test_a_zombie_worker_repeats_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        first = rig.start_worker()
        placer = Placer(rig, "zombie", 250)
        placer.start()
        wait_until(lambda: effects(rig) >= 300, 60, "effects")
        _stop_between_transactions(rig, first)
        rig.start_worker()
        placed = placer.finish()
        took = drained(rig)
        first.signal(signal.SIGCONT)
        after = Placer(rig, "after", 50)
        after.start()
        after.finish()
        drained(rig)
        print(f"the second worker had done the stopped one's work after {took:.1f} s")
        assert first.exit_code is None
        check(rig, [placed, after.placed])


@pytest.mark.long
def test_a_worker_stopped_while_it_writes_delays_the_others_and_no_more(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        first = rig.start_worker()
        rig.start_worker()
        placements = []
        impatient = Database(str(rig.database.url), busy_timeout=0.3)
        for turn in range(2):
            placer = Placer(rig, f"stopped-{turn}", 60)
            placer.start()
            before = effects(rig)
            wait_until(lambda before=before: effects(rig) > before + 20, 60, "effects")
            first.signal(signal.SIGSTOP)
            # Longer than the heartbeat's time-out: Temporal gives its drains to the other one meanwhile.
            stopped = time.monotonic()
            while time.monotonic() < stopped + 4.5:
                with contextlib.suppress(StoreBusy), impatient.write():
                    time.sleep(0.05)
            first.signal(signal.SIGCONT)
            placements.append(placer.finish())
        impatient.close()
        drained(rig)
        assert first.exit_code is None
        check(rig, placements)


def test_two_workers_side_by_side(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        rig.start_worker()
        placer = Placer(rig, "twins", 200)
        placer.start()
        wait_until(lambda: effects(rig) >= 300, 60, "effects")
        rig.workers[0].kill()
        placed = placer.finish()
        took = drained(rig)
        print(f"the twin of a killed worker was done {took:.1f} s after the last order")
        check(rig, [placed])


@pytest.mark.parametrize(
    "away",
    [
        "nothing",
        "temporal hangs",
        pytest.param("temporal", marks=pytest.mark.long),
        pytest.param("valkey hangs", marks=pytest.mark.long),
    ],
)
def test_sigterm_ends_a_busy_worker_within_seconds(tmp_path: Path, away: str) -> None:
    with Rig(tmp_path) as rig:
        worker = rig.start_worker()
        placer = Placer(rig, "term", 100)
        placer.start()
        wait_until(lambda: effects(rig) >= 100, 60, "effects")
        server = rig.temporal if away.startswith("temporal") else rig.valkey
        if away.endswith("hangs"):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
        elif away != "nothing":
            server.kill()
        took = worker.terminate(60)
        print(f"SIGTERM with {away} away: ended in {took:.1f} s")
        assert worker.exit_code == 0, worker.output()[-3000:]
        placed = placer.finish()
        assert placed.longest < PATIENT, "an order waits for an outage that is none of its business"
        if away.endswith("hangs"):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGCONT)
        elif away != "nothing":
            rig.restart("temporal")
        rig.start_worker()
        again = drained(rig)
        print(f"the next worker was done {again:.1f} s after its start")
        check(rig, [placed])


def test_a_worker_killed_at_rest_is_replaced_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        first = Placer(rig, "first", 1)
        first.start()
        first.finish()
        _rest(rig)
        rig.kill("worker")
        # Nobody works: every order finds the pipeline cold, and the wakes must not pile up in the runs.
        placer = Placer(rig, "unheard", 200, rate=200)
        placer.start()
        placed = placer.finish()

        async def history() -> int:
            handle = (await rig.connect()).get_workflow_handle(RELAY_ID)
            return (await handle.describe()).history_length

        length = asyncio.run(history())
        assert length < 50, f"{length} events in the relay's history"
        rig.start_worker()
        _rest(rig)
        rig.kill("worker")
        rig.start_worker()
        after = Placer(rig, "after", 1)
        after.start()
        after.finish()
        took = drained(rig)
        print(f"the first order after a kill at rest: {took:.1f} s")
        waited = asyncio.run(_waits_for_a_dead_worker(rig))
        assert all(each < 5 for each in waited), f"Temporal waits for a dead worker as by default, 10 s: {waited}"
        check(rig, [first.placed, placed, after.placed])


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, "temporal"])
@pytest.mark.parametrize(
    "reached",
    ["SELECT count(*) FROM outbox WHERE status <> 'PENDING'", "SELECT count(*) FROM billing_entries"],
    ids=["pushed", "one receiver has it"],
)
def test_whoever_dies_between_the_first_order_after_a_rest_and_the_wakes_behind_the_relay(
    tmp_path: Path, blow: signal.Signals | str, reached: str
) -> None:
    """The stages behind the relay are drained ahead of their runs, which are still asleep."""
    with Rig(tmp_path) as rig:
        worker = rig.start_worker()
        first = Placer(rig, "first", 1)
        first.start()
        first.finish()
        _rest(rig)
        before = rig.number(reached)
        cold = Placer(rig, "cold", 5)
        cold.start()
        wait_until(lambda: rig.number(reached) > before, 60, "the first order is on its way")
        if isinstance(blow, signal.Signals):
            worker.signal(blow)
            cold.finish()
            wait_until(lambda: worker.exit_code is not None, 60, "the worker ended")
            assert worker.exit_code == (-blow if blow is signal.SIGKILL else 0), worker.output()[-3000:]
            rig.start_worker()
        else:
            rig.kill(blow)
            cold.finish()
            rig.restart(blow)
        drained(rig)
        check(rig, [first.placed, cold.placed])


def test_an_order_whose_wake_is_lost_is_found(tmp_path: Path) -> None:
    async def lost() -> None:
        """The placing process died before it could wake anybody."""

    with Rig(tmp_path) as rig:
        rig.start_worker()
        first = Placer(rig, "first", 1)
        first.start()
        first.finish()
        _rest(rig)
        Intake(rig.database, lost).place(Order("lost-1", "sku", 1, 100, "JPY"))
        took = drained(rig)
        print(f"an order whose wake is lost: {took:.1f} s")


@pytest.mark.parametrize("missing", ["temporal", "valkey"])
def test_a_worker_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, missing: str) -> None:
    with Rig(tmp_path) as rig:
        rig.kill(missing)
        started = time.monotonic()
        with pytest.raises(AssertionError, match="the worker ended with 1"):
            rig.start_worker()
        said = rig.workers[0].output()
        print(f"without {missing}: ended in {time.monotonic() - started:.1f} s")
        assert "does not answer" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_idle_worker_ends_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with Rig(tmp_path) as rig:
        worker = rig.start_worker()
        group = os.getpgid(worker.pid)
        _rest(rig)
        worker.signal(number)
        wait_until(lambda: worker.exit_code is not None, 60, "the worker ended")
        assert worker.exit_code == (-number if number is signal.SIGKILL else 0), worker.output()[-2000:]
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)

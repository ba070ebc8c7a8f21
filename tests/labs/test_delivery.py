"""`lab delivery`: its transcript to the letter, with any names, beside another one, and a wrong state is found."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

import labs.delivery
import starter
from store.outbox import publish_again
from store.schema import deliveries
from tests.embedded.processes import processes_of
from tests.labs.running import start
from tests.waiting import wait_until


def transcript(event: str = "order-7", job: str = "job-1", amount: int = 100) -> str:
    """Written out, not computed the way the command does it."""
    e, j = repr(event), repr(job)
    return f"""\
[('billing', {e}, 'pending'), ('mail', {e}, 'pending')]
[('billing', {e}, 'done'), ('mail', {e}, 'pending')]
mail: failed; pending retained
[('billing', {e}, 'done'), ('mail', {e}, 'pending')]
[('billing', {e}, 'done'), ('mail', {e}, 'done')]
charge=committed
ship=failed
steps=[({j}, 'charge')]
charges=[({j}, {amount})]
charge=already_completed
ship=completed
steps=[({j}, 'charge'), ({j}, 'ship')]
charges=[({j}, {amount})]
charge=already_completed
ship=completed
steps=[({j}, 'charge'), ({j}, 'ship')]
charges=[({j}, {amount})]
"""


# Nobody listens there: a command that used any of these would fail.
ELSEWHERE = {
    "TEMPORAL_ADDRESS": "127.0.0.1:1",
    "TEMPORAL_API_KEY": "none",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "DATABASE_URL": "postgresql://127.0.0.1:1/none",
}


def test_the_transcript_with_default_and_changed_names_side_by_side(tmp_path: Path) -> None:
    one = start(tmp_path / "one", "lab", "delivery")
    names = ("--event", "注文 七/'é'", "--job", "job:№ 1", "--amount", "1000000000000")
    two = start(tmp_path / "two", "lab", "delivery", "--json", *names, **ELSEWHERE)
    assert one.finish() == (transcript(), "")
    document = json.loads(two.finish()[0])
    assert "".join(f"{line}\n" for line in document["lines"]) == transcript("注文 七/'é'", "job:№ 1", 10**12)
    assert document["verdict"] == "ok"
    assert document["web_ui"] is None
    for each in (one, two):
        each.nothing_left()
        assert not (each.folder / "home").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_end_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    running = start(tmp_path, "lab", "delivery")
    wait_until(lambda: len(processes_of(tmp_path)) >= 3, 60, "the servers of the scratch stack run")
    running.process.send_signal(number)
    running.finish(130)
    running.nothing_left()


def test_a_state_that_is_reset_by_a_second_publish_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reset_too(connection: Connection, event_id: str) -> Any:
        connection.execute(update(deliveries).values(status="pending"))
        return publish_again(connection, event_id)

    monkeypatch.setattr(labs.delivery, "publish_again", reset_too)
    assert starter.main(["lab", "delivery"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[3] == "[('billing', 'order-7', 'pending'), ('mail', 'order-7', 'pending')]"
    assert "delivery: the deliveries must be [('billing', 'order-7', 'done')" in said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--event", ""], "event: must not be empty"),
        (["--job", "a\nb"], "job: must not hold control or unprintable characters"),
        (["--amount", "0"], "amount: must be from 1 to 1,000,000,000,000"),
        (["--event", "job-1:order-shipped"], "event: is the id of one of the job's own events"),
    ],
)
def test_unusable_names_are_refused_before_anything_starts(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(*_: object, **__: object) -> Callable[..., object]:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr("embedded.start", started)
    assert starter.main(["lab", "delivery", *arguments]) == 1
    assert sentence in capsys.readouterr().err

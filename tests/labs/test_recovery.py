"""`lab recovery`: every step's numbers, for any numbers of orders, and a wrong number is found."""

import json
from pathlib import Path
from typing import Any

import pytest

import labs.recovery
from labs.recovery_state import State, differences
from tests.labs.running import Running, start
from tests.labs.test_delivery import ELSEWHERE

FIELDS = ("orders", "sales_orders", "sales_amount", "mail", "dead", "intake", "generation")


def amount(orders: int) -> int:
    return sum(100 * number for number in range(1, orders + 1))


def expected(first: int, during: int) -> list[tuple[Any, ...]]:
    """The steps and what each of them shows."""
    whole = first + during
    before = (first, first, amount(first), first, 0, "OPEN", "initial")
    paused = (whole, first, amount(first), whole, during, "PAUSED", "initial")
    after = (whole, whole, amount(whole), whole)
    return [
        ("start", 0, 0, 0, 0, 0, "OPEN", "initial"),
        ("orders", *before),
        ("duplicates", *before),
        ("outage", *paused[:5], "OPEN", "initial"),
        ("rebuilding", *paused),
        ("refused", *paused),
        ("activated", *after, during, "PAUSED", "generation-1"),
        ("resumed", *after, during, "OPEN", "generation-1"),
        ("redriven", *after, 0, "OPEN", "generation-1"),
        ("audit", *after, 0, "OPEN", "generation-1"),
    ]


def check(running: Running, first: int, during: int) -> None:
    out, err = running.finish()
    assert err == ""
    steps = json.loads(out)
    assert [(step["step"], *(step[name] for name in FIELDS)) for step in steps] == expected(first, during)
    assert [step["certificate"] for step in steps[:6]] == [None] * 6
    for step in steps[6:]:
        certificate = step["certificate"]
        assert certificate["orders"] == first + during
        assert certificate["sums"] == {"JPY": [first + during, amount(first + during)]}
        assert certificate["digest"].startswith("sha256:")
    running.nothing_left()


def test_it_holds_for_any_numbers_whatever_the_environment_says(tmp_path: Path) -> None:
    misled = {**ELSEWHERE, "SAISEI_ATTEMPTS": "1", "SAISEI_API_URL": "http://127.0.0.1:1", "SAISEI_API_PORT": "1"}
    small = start(tmp_path / "small", "lab", "recovery", "--first", "1", "--during", "1", "--json", **misled)
    other = start(tmp_path / "other", "lab", "recovery", "--first", "7", "--during", "5", "--json")
    check(small, 1, 1)
    check(other, 7, 5)


def test_it_shows_a_table_after_each_step(tmp_path: Path) -> None:
    out, err = start(tmp_path, "lab", "recovery").finish()
    assert err == ""
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[::4] if line[:1].isdigit()] == [str(n) for n in range(1, 11)]
    assert lines[0] == "1  start: an empty shop"
    assert lines[26].split()[:6] == ["20", "20", "21,000", "20", "8", "PAUSED"]
    assert lines[-1].startswith("recovery ok: 8 of 20 orders missed sales; ")


def test_a_number_that_is_another_one_is_a_sentence() -> None:
    wanted = State(20, 20, 21_000, 20, 0, "OPEN", "generation-1", {"orders": 20})
    assert differences(wanted, wanted) == []
    seen = State(20, 19, 21_000, 20, 0, "PAUSED", "generation-1", {"orders": 19, "digest": "x"})
    assert differences(wanted, seen) == [
        "sales orders must be 20, but is 19",
        "intake must be OPEN, but is PAUSED",
        "certificate must be {'orders': 20}, but is {'orders': 19}",
    ]
    assert differences(wanted, State(20, 20, 21_000, 20, 0, "OPEN", "generation-1")) == [
        "certificate must be {'orders': 20}, but is None"
    ]


@pytest.mark.parametrize("arguments", [("--first", "0"), ("--during", "1001")])
def test_numbers_out_of_bounds_are_wrong_usage(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    import starter

    with pytest.raises(SystemExit) as ended:
        starter.main(["lab", "recovery", *arguments])
    assert ended.value.code == 2
    assert "must be a whole number from 1 to 1,000" in capsys.readouterr().err
    assert labs.recovery.children()[0].env["SAISEI_BACKOFF"] == "0.05"

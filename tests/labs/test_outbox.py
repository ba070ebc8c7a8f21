"""`lab outbox`: its files agree with the database and each other, for any count, again and again in one folder."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

import pipeline.relay
import starter
from contracts.errors import Refused
from labs.outbox import lab_folder
from store.outbox import pending_events
from tests.labs.running import Running, start

CHECKED = 3 * 4 + 1  # events of the order check, and the one of the relay that dies

FOLDER = "lab ?%20注文"  # a name that is no URL


def counted(database: Path, query: str) -> int:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        number: int = connection.execute(query).fetchone()[0]
        return number


def check_files(folder: Path, orders: int) -> None:
    database = folder / "app.db"
    assert counted(database, "SELECT count(*) FROM orders WHERE id <> '' AND sku <> '' AND qty >= 1") == orders
    events = counted(database, "SELECT count(*) FROM outbox WHERE status = 'PUBLISHED' AND payload <> ''")
    assert events == counted(database, "SELECT count(DISTINCT event_id) FROM outbox") == orders + CHECKED
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "INSERT INTO outbox (event_id, aggregate_id, seq, event_type, payload) VALUES (1, 1, 1, 1, 1)"
        )
        assert connection.execute("SELECT status FROM outbox WHERE event_id = '1'").fetchone() == ("PENDING",)
        connection.rollback()
    assert (folder / "dualwrite.out").read_text() == "INCONSISTENT orders=1 published=0\n"
    assert counted(folder / "dualwrite.db", "SELECT count(*) FROM orders") == 1
    assert counted(folder / "dualwrite.db", "SELECT count(*) FROM outbox") == 0
    assert (folder / "order_check.out").read_text() == "ORDER OK\n"
    duplicate = (folder / "atleastonce.out").read_text()
    event_id = duplicate.removeprefix("DUPLICATE event_id=").removesuffix(" count=2\n")
    assert counted(database, f"SELECT count(*) FROM outbox WHERE event_id = '{event_id}'") == 1
    assert (folder / "report.txt").read_text() == (
        f"orders={orders}\noutbox={events}\nenqueued={events + 1}\nprocessed_unique={events}\n"
    )


def outbox(folder: Path, *arguments: str) -> Running:
    return start(folder, "lab", "outbox", "--dir", str(folder / FOLDER), *arguments)


def test_again_and_again_in_one_folder_beside_another_one(tmp_path: Path) -> None:
    there = outbox(tmp_path / "there", "--orders", "2", "--json")
    for orders in (3, 50, 1):
        here = outbox(tmp_path / "here", *(() if orders == 3 else ("--orders", str(orders))))
        out, err = here.finish()
        assert [line.split()[0] for line in out.splitlines()] == list("12345678")
        assert ("starts afresh" in err) == (orders != 3)
        check_files(here.folder / FOLDER, orders)
        here.nothing_left()
    document = json.loads(there.finish()[0])
    assert document["verdict"] == "ok"
    assert document["counts"] == {"orders": 2, "outbox": 15, "enqueued": 16, "processed_unique": 15}
    assert len(document["steps"]) == 8
    check_files(there.folder / FOLDER, 2)
    there.nothing_left()


def test_a_relay_that_loses_the_order_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline.relay, "pending_events", lambda *arguments: pending_events(*arguments)[::-1])
    assert starter.main(["lab", "outbox", "--dir", str(tmp_path)]) == 1
    wrong = "ORDER WRONG job/check-1 job/check-2 job/check-3"
    assert (tmp_path / "order_check.out").read_text() == f"{wrong}\n"
    said = capsys.readouterr()
    assert f"5  order            {wrong}" in said.out
    assert "outbox: the list must hold each aggregate in seq order" in said.err


@pytest.mark.parametrize("content", [b"", b"notes of mine", b"SQLite format 3\0" + bytes(84)])
def test_a_database_of_somebody_else_is_left_alone(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.db").write_bytes(content)
    (tmp_path / "report.txt").write_text("mine")
    assert starter.main(["lab", "outbox", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"starter.py: {tmp_path}/app.db was not made by `lab outbox` and is left as it is; " + (
        "name another folder with --dir\n"
    )
    assert (tmp_path / "app.db").read_bytes() == content
    assert (tmp_path / "report.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_two_runs_in_one_folder_exclude_each_other(tmp_path: Path) -> None:
    with lab_folder(tmp_path), pytest.raises(Refused, match="is at work in"), lab_folder(tmp_path):
        pass


@pytest.mark.parametrize("orders", ["0", "-1", "100001"])
def test_a_count_out_of_bounds_is_refused(tmp_path: Path, orders: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert starter.main(["lab", "outbox", "--dir", str(tmp_path / "new"), "--orders", orders]) == 1
    assert capsys.readouterr().err == "starter.py: orders: must be from 1 to 100,000\n"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with (
            pytest.raises(Refused, match=r"cannot be made .*; name one that you may write with --dir"),
            lab_folder(folder),
        ):
            pass

"""The fair lock under SQLite's writes: one writer at a time, by turn and by time, free after a kill."""

import ctypes
import itertools
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from contracts.errors import StoreBusy
from store.dialect import is_infrastructure_error
from store.engine import Database
from tests.store.processes import Script
from tests.store.scenes import bump, read_counter, scalar
from tests.waiting import wait_until

HOLD = """
import sys
from store.engine import Database
with Database(sys.argv[1]).write() as connection:
    connection.exec_driver_sql("UPDATE counter SET n = n + 1")
    print("held", flush=True)
    sys.stdin.readline()
"""
# Commits back to back until it is told to stop; each transaction lasts at least so many seconds.
BUSY = """
import sys, threading, time
from store.engine import Database
database = Database(sys.argv[1])
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
while not stop.is_set():
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO turns (who) VALUES (?)", (sys.argv[2],))
        if connection.exec_driver_sql("SELECT count(*) FROM turns WHERE who = ?", (sys.argv[2],)).scalar() == 3:
            print("running", flush=True)
        time.sleep(float(sys.argv[3]))
"""


def test_a_lock_held_by_another_process_is_one_sentence_and_free_after_its_kill(
    counter: Database, open_database: Callable[..., Database]
) -> None:
    hurried = open_database(str(counter.url), busy_timeout=0.2)
    with Script(HOLD, str(counter.url)) as holder:
        assert holder.line() == "held"
        with pytest.raises(StoreBusy) as raised, hurried.write():
            pass
        assert "\n" not in str(raised.value)
        assert "0.2 s" in str(raised.value)
        assert is_infrastructure_error(raised.value)
        assert read_counter(hurried) == 0
        holder.kill()  # SIGKILL in the middle of its transaction
        bump(hurried)
    assert read_counter(counter) == 1


def test_a_foreign_program_that_holds_the_database_is_the_same_sentence(
    counter: Database, open_database: Callable[..., Database]
) -> None:
    hurried = open_database(str(counter.url), busy_timeout=0.01)
    with closing(sqlite3.connect(str(counter.url.database), isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        for _ in range(60):  # more often than the pool has connections
            with pytest.raises(StoreBusy, match="write lock"), hurried.write():
                pass
        foreign.execute("ROLLBACK")
    bump(hurried)
    assert read_counter(counter) == 1


def test_a_second_process_gets_its_turn_between_two_commits_of_a_busy_one(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "busy", "0") as busy:
        assert busy.line() == "running"
        for _ in range(30):
            with counter.write() as connection:
                connection.exec_driver_sql("INSERT INTO turns (who) VALUES ('we')")
        busy.say()
        assert busy.wait() == 0
    with counter.read() as connection:
        order = list(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    ours = [index for index, who in enumerate(order) if who == "we"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ours)]
    # Whoever waits comes next: between two of our writes the busy one has a handful of turns, not hundreds.
    assert len(ours) == 30
    # The most of them: where the machine leaves us alone between two writes, nobody waits and the busy one goes on.
    assert sorted(gaps)[len(gaps) // 2] <= 20, gaps


def test_two_busy_processes_share_the_turns(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "a", "0") as a, Script(BUSY, str(counter.url), "b", "0") as b:
        assert (a.line(), b.line()) == ("running", "running")
        for _ in range(40):
            bump(counter)
        a.say()
        b.say()
        assert (a.wait(), b.wait()) == (0, 0)
    with counter.read() as connection:
        order = "".join(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    # While both are at it: the one that hears later of its end has the last turns for itself.
    shared = order[max(order.index("a"), order.index("b")) : min(order.rindex("a"), order.rindex("b"))]
    longest = max(len(run) for run in shared.replace("ab", "a b").replace("ba", "b a").split())
    assert longest < max(50, len(shared) // 3), shared


def test_short_transactions_get_as_much_time_as_the_long_ones_beside_them(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "long", "0.03") as long, Script(BUSY, str(counter.url), "short", "0") as short:
        assert (long.line(), short.line()) == ("running", "running")
        begun = int(scalar(counter, "SELECT max(id) FROM turns"))
        count = f"SELECT count(*) FROM turns WHERE who = 'long' AND id > {begun}"
        wait_until(lambda: scalar(counter, count) >= 10, 60, "ten long ones are through")
        long.say()
        short.say()
        assert (long.wait(), short.wait()) == (0, 0)
    with counter.read() as connection:
        order = list(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    last = max(index for index, who in enumerate(order) if who == "long")
    shared = order[begun:last]
    # Turn by turn it would be one each; how many more there are depends on how long a commit takes here.
    assert shared.count("short") > 2 * shared.count("long"), "".join(who[0] for who in shared)


def test_a_long_transaction_goes_on_when_nobody_uses_the_time_that_is_left_to_others(counter: Database) -> None:
    with Script(BUSY, str(counter.url), "long", "0.03") as long:
        assert long.line() == "running"
        for _ in range(5):
            bump(counter)
        begun = int(scalar(counter, "SELECT max(id) FROM turns"))
        wait_until(lambda: scalar(counter, "SELECT max(id) FROM turns") >= begun + 5, 60, "the long ones go on")
        long.say()
        assert long.wait() == 0


def test_of_three_processes_a_long_one_stands_back_for_both_others_and_neither_of_them_for_long(
    counter: Database,
) -> None:
    with (
        Script(BUSY, str(counter.url), "l", "0.04") as long,
        Script(BUSY, str(counter.url), "s", "0") as short,
        Script(BUSY, str(counter.url), "t", "0") as third,
    ):
        three = (long, short, third)
        assert [each.line() for each in three] == ["running"] * 3
        begun = int(scalar(counter, "SELECT max(id) FROM turns"))
        count = f"SELECT count(*) FROM turns WHERE who = 'l' AND id > {begun}"
        wait_until(lambda: scalar(counter, count) >= 10, 60, "ten long ones are through")
        for each in three:
            each.say()
        assert [each.wait() for each in three] == [0] * 3
    with counter.read() as connection:
        order = "".join(connection.exec_driver_sql("SELECT who FROM turns ORDER BY id").scalars())
    shared = order[begun : min(order.rindex(who) for who in "lst")]
    turns = {who: shared.count(who) for who in "lst"}
    # By turns alone, each of the others would have as many as the long one has.
    assert turns["s"] + turns["t"] > 3 * turns["l"], shared
    # What the long one leaves is for both, and it comes to its own turn again.
    assert 3 * min(turns["s"], turns["t"]) > max(turns["s"], turns["t"]), shared
    assert turns["l"] >= 9, shared


class Stopped(BaseException):
    """What a time-out raises inside the thread of a synchronous activity, at any line."""


def _raise_in(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))


def test_a_thread_that_is_stopped_in_the_queue_gives_its_place_back(counter: Database) -> None:
    ended: list[str] = []

    def wait_in_line() -> None:
        try:
            with counter.write():
                ended.append("wrote")
        except Stopped:
            ended.append("stopped")

    with counter.write():
        thread = threading.Thread(target=wait_in_line, daemon=True)
        thread.start()
        assert counter._lock is not None
        wait_until(lambda: len(counter._lock._queue) == 2, 60, "the second writer stands in line")  # type: ignore[union-attr]
        _raise_in(thread)
    thread.join(60)
    assert ended == ["stopped"]
    bump(counter)
    assert read_counter(counter) == 1


def test_writers_that_are_stopped_anywhere_leave_the_lock_free(counter: Database) -> None:
    lock = counter._lock
    assert lock is not None
    end = threading.Event()
    stopped = [threading.Semaphore(0) for _ in range(3)]

    def work(index: int) -> None:
        while not end.is_set():
            try:
                while not end.is_set():
                    with lock.held():
                        pass
            except Stopped:
                stopped[index].release()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        _raise_in(threads[number % 3])
        assert stopped[number % 3].acquire(timeout=60)
    end.set()
    for thread in threads:
        thread.join(60)
    bump(counter)
    assert (read_counter(counter), len(lock._queue)) == (1, 0)

"""What a commit tells those who look many times a second, so that most of their looks need no read."""

from collections.abc import Callable
from pathlib import Path

from store.engine import Database
from store.outbox import ANY_PENDING
from tests.store.scenes import place, scalar, together


def test_each_commit_is_told_of_once_to_each_watch(sqlite: Database, open_database: Callable[..., Database]) -> None:
    other = open_database(sqlite.url)
    watches = sqlite.changes(), sqlite.changes(), other.changes()
    for watch in watches:
        assert watch.any()  # what was there before it began to watch
        assert not watch.any()
    for number, database in enumerate((sqlite, other), 1):
        place(database, number)
        assert [watch.any() for watch in watches] == [True] * 3
        assert [watch.any() for watch in watches] == [False] * 3


def test_a_read_and_what_is_taken_back_are_no_news(sqlite: Database) -> None:
    watch = sqlite.changes()
    watch.any()
    scalar(sqlite, "SELECT count(*) FROM orders")
    try:
        with sqlite.write() as connection:
            connection.exec_driver_sql("UPDATE control SET hot_until = 7")
            raise ValueError
    except ValueError:
        pass
    assert not watch.any()


def test_a_watch_never_waits_for_a_writer(sqlite: Database) -> None:
    watch = sqlite.changes()
    watch.any()
    with sqlite.write() as connection:
        connection.exec_driver_sql("UPDATE control SET hot_until = 7")
        assert not watch.any()
    assert watch.any()


def test_nothing_is_missed_between_a_question_and_the_read_after_it(sqlite: Database) -> None:
    """A poller that reads only after news sees each of many orders that are placed meanwhile."""
    seen, orders = 0, 200

    def placing() -> None:
        for number in range(orders):
            place(sqlite, number + 1)

    def polling() -> None:
        nonlocal seen
        watch = sqlite.changes()
        while seen < orders:
            if watch.any():
                seen = scalar(sqlite, "SELECT count(*) FROM orders")

    assert together(placing, polling) == [None, None]
    assert seen == orders


def test_where_it_cannot_be_told_there_may_be_news(database: Database, tmp_path: Path) -> None:
    watch = database.changes()
    watch.any()
    assert watch.any() is not database.is_sqlite
    if database.is_sqlite:
        missing = Database(f"sqlite:///{tmp_path / 'gone' / 'saisei.db'}")
        (tmp_path / "gone").rename(tmp_path / "away")
        assert missing.changes().any()
        missing.close()


def test_a_file_that_was_moved_away_is_worth_every_look(sqlite: Database, tmp_path: Path) -> None:
    """Nobody commits to it any more, and whoever reads is told why."""
    watch = sqlite.changes()
    watch.any()
    assert not watch.any()
    Path(str(sqlite.url.database)).rename(tmp_path / "away.db")
    assert [watch.any(), watch.any()] == [True, True]


def test_a_watch_answers_a_question_of_its_own(database: Database) -> None:
    watch = database.changes()
    watch.any()
    assert watch.finds(ANY_PENDING) is not database.is_sqlite  # where it cannot be told there may be
    place(database, 1)
    assert watch.finds(ANY_PENDING)
    assert watch.finds("SELECT 1 FROM no_such_table")

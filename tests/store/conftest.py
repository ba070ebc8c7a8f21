"""Tables that only the tests of SQLite's locking have."""

import pytest

from store.engine import Database


@pytest.fixture
def counter(sqlite: Database) -> Database:
    with sqlite.write() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (n INTEGER NOT NULL)")
        connection.exec_driver_sql("CREATE TABLE turns (id INTEGER PRIMARY KEY AUTOINCREMENT, who TEXT NOT NULL)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")
    return sqlite

"""A real API process on a home of its own, and what the tests ask it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from embedded.tied import tie
from store.engine import Database
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("DATABASE_URL", "REDIS_URL", "TEMPORAL_", "SAISEI_")
PROGRAM = "import api, config; config.end(api.main())"


def environment(home: Path, **more: str) -> dict[str, str]:
    """This machine's environment without what it says of servers, on that home."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SERVERS)}
    return env | {"SAISEI_HOME": str(home), "SAISEI_API_PORT": "0", "TEMPORAL_CONFIG_FILE": os.devnull} | more


def order(number: int = 1, **other: Any) -> dict[str, Any]:
    """The fields of order n, as the command line would place it."""
    return {"id": f"order-{number}", "sku": "sku-1", "qty": 1, "amount": 100 * number, "currency": "JPY"} | other


class Api:
    """`python api.py` on `home`. `program` may change something in the process before it starts."""

    def __init__(self, home: Path, program: str = PROGRAM, **env: str) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "api.log"
        with self._log.open("wb") as log:
            self.process = tie(
                subprocess.Popen(
                    [sys.executable, "-c", program], cwd=ROOT, env=environment(home, **env), stdout=log, stderr=log
                )
            )
        try:
            self.url = wait_until(self._ready, 60, "the API is ready")
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}: {self.log()}") from None
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def _ready(self) -> str:
        assert self.process.poll() is None, self.log()
        found = re.search(r"^api ready (http://[0-9.]+:\d+)$", self.log(), re.MULTILINE)
        return found[1] if found else ""

    def log(self) -> str:
        return self._log.read_text()

    def place(self, fields: Mapping[str, Any]) -> httpx.Response:
        return self.client.post("/orders", json=fields)

    def send(self, body: bytes, **headers: str) -> httpx.Response:
        return self.client.post("/orders", content=body, headers={"content-type": "application/json"} | headers)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.client.close()


@contextlib.contextmanager
def running(home: Path, program: str = PROGRAM, **env: str) -> Iterator[Api]:
    """An API for the block."""
    api = Api(home, program, **env)
    try:
        yield api
    finally:
        api.close()


@contextlib.contextmanager
def database_of(home: Path) -> Iterator[Database]:
    """The database of that home, as another process opens it."""
    database = Database(f"sqlite:///{home / 'saisei.db'}")
    try:
        yield database
    finally:
        database.close()


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document in `response`, which is a complete one of that status and tells of nothing inside."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert set(document) >= {"type", "title", "status", "detail"}
    assert document["status"] == status
    assert ("retry-after" in response.headers) == (status == 503)
    for inside in ("Traceback", "sqlalchemy", "sqlite3", str(ROOT), ".py"):
        assert inside not in response.text
    return document

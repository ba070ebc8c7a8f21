"""A recovery under way on real servers, and the browser that looks at it: `make test-ui`, and not `make test`."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection
from temporalio.client import Client

import embedded
from commands.links import Links
from commands.stack import worker_child
from contracts import search
from contracts.messages import RebuildInput
from contracts.names import PROCEED_SIGNAL, REBUILD_ID
from labs.scratch import process_env
from receivers.registry import RECEIVERS, by_name
from runs.starts import Runs
from store.deliveries import DONE, RETRYING, deliveries_of
from store.engine import Database, sqlite_url
from store.rebuild import last_rebuild
from store.status import receiver_status
from tests.commands.cli import Cli
from tests.ui.browser import Browser, browser, programs
from tests.waiting import wait_until

T = TypeVar("T")

# The second attempt follows after 20 s, the third after 40 more: there is time to look at it in between.
BACKOFF = 20.0
ORDERS = 12
FAILING = f"order-{ORDERS + 1}:placed"


def pytest_configure(config: pytest.Config) -> None:
    try:
        programs()
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None


@dataclass(frozen=True)
class Shop:
    """`ORDERS` orders are everywhere, one more fails at `sales` and is tried again, and a rebuild is held before it
    seals its generation."""

    stack: embedded.Stack
    database: Database

    @property
    def links(self) -> Links:
        assert self.stack.ui_url is not None
        return Links(self.stack.ui_url)

    def proceed(self) -> None:
        """Let the rebuild come to its end."""

        async def tell(client: Client) -> None:
            handle = client.get_workflow_handle(REBUILD_ID)
            await handle.signal(PROCEED_SIGNAL)
            await handle.result()

        self.with_client(tell)

    def attempts(self) -> int:
        """How often the failing event was tried at `sales`."""
        (delivery,) = (each for each in self.read(lambda c: deliveries_of(c, FAILING)) if each.receiver == "sales")
        assert delivery.status in ("pending", RETRYING)
        return delivery.attempts

    def read(self, work: Callable[[Connection], T]) -> T:
        with self.database.read() as connection:
            return work(connection)

    def with_client(self, work: Callable[[Client], Any]) -> Any:
        async def connected() -> Any:
            return await work(await Client.connect(str(self.stack.temporal_address)))

        return asyncio.run(connected())


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    home = tmp_path_factory.mktemp("shop")
    children = [worker_child(process_env(backoff=BACKOFF, idle=0.2))]
    with embedded.start(home, children=children, search_attributes=search.START_DEV) as stack:
        database = Database(sqlite_url(home / "saisei.db"))
        shop = Shop(stack, database)
        cli = Cli(home)
        cli.json("orders", "place", "--start", "1", "--count", str(ORDERS))
        wait_until(lambda: shop.read(_all_done), 30, "all receivers took the orders")
        cli.json("fault", "on", "--receiver", "sales")
        cli.json("orders", "place", "--start", str(ORDERS + 1), "--count", "1")
        wait_until(lambda: shop.read(_tried), 30, "the event failed at sales, and is done elsewhere")
        shop.with_client(lambda client: Runs(client, tuple(by_name(RECEIVERS))).start_rebuild(RebuildInput(hold=True)))
        wait_until(lambda: shop.read(_held), 30, "the rebuild is held")
        yield shop
        database.close()


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="session")
def images() -> Path:
    """Where README's pictures are."""
    return Path(__file__).resolve().parents[2] / "docs" / "images"


def _all_done(connection: Connection) -> bool:
    return all(each.counts[DONE] == ORDERS for each in receiver_status(connection))


def _tried(connection: Connection) -> bool:
    states = {each.receiver: each.status for each in deliveries_of(connection, FAILING)}
    return states == {"billing": DONE, "mail": DONE, "sales": RETRYING}


def _held(connection: Connection) -> bool:
    rebuild = last_rebuild(connection)
    return rebuild is not None and rebuild.phase == "reconciling"
